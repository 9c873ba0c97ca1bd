"""Members that sleep, that are not heard, and whose clocks are wrong; and the broker being away.

A worker keeps the rules of `schemas/log/membership.py`: without an acknowledged heartbeat for a
lease it writes nothing; when it learns that the lease is over, it begins another life.
"""

from infra.simulator.cluster import Cluster
from infra.simulator.members.worker import SimWorker
from infra.simulator.members.worker_process import SimProcess
from schemas.fleet import CLOCK_MARGIN_MS, LEASE_MS
from schemas.records import Work
from streams.core.events import FleetRecordArrived

SKEW_MS_MAX = 2.0 * CLOCK_MARGIN_MS


def pause_worker(cluster: Cluster, worker: SimWorker, for_ms: float) -> None:
    """Its process is stopped for a while."""
    if not worker.is_silent:
        process = worker.process
        worker.clock.sleep()
        cluster.clock.after(for_ms, lambda: _heard_again(cluster, worker, process))


def stall_over_input(cluster: Cluster, worker: SimWorker, ms_per_token: float) -> None:
    """Its process stands still over each prompt that it takes, the longer the larger that is: so it
    loses its lease over large ones, and whoever gets them next may, too."""

    def stand_still(work: Work) -> None:
        tokens = len(work.prompt_tokens) // 4
        pause_worker(cluster, worker, ms_per_token * tokens)

    worker.on_work = stand_still


def mute_worker(cluster: Cluster, worker: SimWorker, for_ms: float) -> None:
    """Its heartbeats do not get through for a while; at the end of its lease it falls silent."""
    if worker.is_silent:
        return
    process, worker.is_mute = worker.process, True

    def doubt() -> None:
        if worker.is_mute and worker.process is process and worker.alive:
            worker.clock.sleep()

    cluster.clock.at(worker.beat_ms + LEASE_MS, doubt)
    cluster.clock.after(for_ms, lambda: _heard_again(cluster, worker, process))


def _heard_again(cluster: Cluster, worker: SimWorker, process: SimProcess) -> None:
    """It goes on, unless its lease has ended meanwhile."""
    worker.is_mute = False
    if worker.process is not process or not process.alive:
        return
    if cluster.clock.now_ms - worker.beat_ms >= LEASE_MS:
        cluster.members.rejoin(worker)
    else:
        worker.clock.wake()


def stale_heartbeat(cluster: Cluster, worker: SimWorker, number: int) -> None:
    """Deliver a heartbeat again that `number` later ones have overtaken."""
    beats = cluster.members.recent_beats[worker.worker_id]
    if len(beats) > number:
        record = beats[-1 - number]
        offset = cluster.bus.next_offset("fleet", 0)
        cluster.bus.send(
            ("fleet", 0), record, lambda: cluster.router.apply(FleetRecordArrived(record, offset))
        )


def set_clock(worker: SimWorker, ahead_ms: float) -> None:
    """Set a worker's clock ahead of all others, or behind them."""
    worker.wall.ahead_ms = ahead_ms


def pause_router(cluster: Cluster, for_ms: float) -> None:
    """The router's process is stopped; after a lease another one takes over."""
    router = cluster.router
    if not router.alive or router.is_asleep:
        return
    epoch = router.epoch
    router.sleep()

    def replace() -> None:
        if router.is_asleep and router.epoch == epoch:
            router.take_over()
            cluster.members.join_router()

    if for_ms > LEASE_MS:
        cluster.clock.after(LEASE_MS, replace)
    cluster.clock.after(for_ms, router.wake)


def lose_broker(cluster: Cluster, for_ms: float) -> None:
    """Nothing gets into the log for a while, and what is on its way waits. After a lease everybody
    joins again, and the router's partitions are taken anew."""
    until_ms = cluster.clock.now_ms + for_ms
    cluster.bus.held_until_ms = max(cluster.bus.held_until_ms, until_ms)
    for worker in list(cluster.workers.values()):
        mute_worker(cluster, worker, for_ms)
    if for_ms > LEASE_MS:
        cluster.router.die(0)

        def take_over() -> None:
            cluster.router.take_over()
            cluster.members.join_router()
            for gateway in cluster.gateways.living:
                gateway.epoch += 1
                cluster.members.join_gateway(gateway)

        cluster.clock.after(for_ms, take_over)
