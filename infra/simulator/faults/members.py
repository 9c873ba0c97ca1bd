"""Members that sleep, whose heartbeats are lost or whose clocks are wrong; and a broker outage.

A worker keeps the rules of `streams/log/membership.py`: without an acknowledged heartbeat for the
length of a lease it writes nothing. When it learns that its lease has ended, it joins again in a
new epoch.
"""

from infra.simulator.cluster import Cluster
from infra.simulator.members.worker import SimWorker
from infra.simulator.members.worker_process import SimProcess
from schemas.fleet import CLOCK_MARGIN_MS, LEASE_MS
from schemas.records import Work
from streams.core.events import FleetRecordArrived

SKEW_MS_MAX = 2.0 * CLOCK_MARGIN_MS


def pause_worker(cluster: Cluster, worker: SimWorker, for_ms: float) -> None:
    """Suspend a worker's process for a while."""
    if not worker.is_silent:
        process = worker.process
        worker.clock.sleep()
        cluster.clock.after(for_ms, lambda: _heard_again(cluster, worker, process))


def stall_over_input(cluster: Cluster, worker: SimWorker, ms_per_token: float) -> None:
    """Suspend a worker's process over each prompt, for a time proportional to its length.

    So the worker loses its lease over large prompts; the next worker that gets them may lose its
    lease, too.
    """

    def stand_still(work: Work) -> None:
        tokens = len(work.prompt_tokens) // 4
        pause_worker(cluster, worker, ms_per_token * tokens)

    worker.on_work = stand_still


def mute_worker(cluster: Cluster, worker: SimWorker, for_ms: float) -> None:
    """Lose a worker's heartbeats for a while; at the end of its lease it suspends itself."""
    if worker.is_silent:
        return
    process, worker.is_mute = worker.process, True

    def doubt() -> None:
        if worker.is_mute and worker.process is process and worker.alive:
            worker.clock.sleep()

    cluster.clock.at(worker.beat_ms + LEASE_MS, doubt)
    cluster.clock.after(for_ms, lambda: _heard_again(cluster, worker, process))


def _heard_again(cluster: Cluster, worker: SimWorker, process: SimProcess) -> None:
    """Let a worker continue, or join again if its lease has ended."""
    worker.is_mute = False
    if worker.process is not process or not process.alive:
        return
    if cluster.clock.now_ms - worker.beat_ms >= LEASE_MS:
        cluster.members.rejoin(worker)
    else:
        worker.clock.wake()


def stale_heartbeat(cluster: Cluster, worker: SimWorker, number: int) -> None:
    """Deliver a heartbeat again, after `number` later ones."""
    beats = cluster.members.recent_beats[worker.worker_id]
    if len(beats) > number:
        record = beats[-1 - number]
        offset = cluster.bus.next_offset("fleet", 0)
        cluster.bus.send(
            ("fleet", 0), record, lambda: cluster.router.apply(FleetRecordArrived(record, offset))
        )


def set_clock(worker: SimWorker, ahead_ms: float) -> None:
    """Set a worker's clock ahead of all others (or behind them, if negative)."""
    worker.wall.ahead_ms = ahead_ms


def pause_router(cluster: Cluster, for_ms: float) -> None:
    """Suspend the router's process; after a lease, another one takes over."""
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
    """Hold all records for a while.

    After a lease, all members join again, and a new router takes the partitions.
    """
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
