"""Losses and slowdowns in a simulated cluster, as `SimFault` objects."""

from collections.abc import Sequence

import numpy as np

from infra.simulator.cluster import Cluster, SimFault
from infra.simulator.members.gateways import SimAnswer, SimGateway
from infra.simulator.members.router import PARTITION
from infra.simulator.members.worker_process import SimProcess
from schemas.records import Cancellation, CancelReason, Outcome, Request
from streams.core.events import CancellationArrived, ResumptionArrived

UNMOVED_MS = 2_500.0  # a router that should die over orders dies without any after this time


def slow_prefill(at_ms: float, worker_ids: list[str], times: float) -> SimFault:
    """Make prompts take `times` as long on these workers from now on."""

    def strike(cluster: Cluster) -> None:
        for worker_id in worker_ids:
            cluster.workers[worker_id].process.engine.gpu.slow_prefill = times

    return SimFault(at_ms, strike)


def slow_links(at_ms: float, times: float) -> SimFault:
    """Make KV transfers take `times` as long from now on."""

    def strike(cluster: Cluster) -> None:
        cluster.links.slow = times

    return SimFault(at_ms, strike)


def crash(at_ms: float, worker_id: str) -> SimFault:
    """End a worker's process with all its state."""
    return SimFault(at_ms, lambda cluster: cluster.workers[worker_id].crash())


def restart(at_ms: float, worker_id: str) -> SimFault:
    """Restart a dead worker without state, in a new epoch."""

    def strike(cluster: Cluster) -> None:
        worker = cluster.workers[worker_id]
        if not worker.alive:
            worker.restart()
            cluster.members.join(worker)

    return SimFault(at_ms, strike)


def crash_on_outcome(at_ms: float, worker_id: str, late_ms: float, for_ms: float) -> SimFault:
    """Crash a worker over its next outcome, which routers read `late_ms` later.

    So they see the worker's next epoch before the outcome. Does nothing if the faults have healed
    by then.
    """

    def strike(cluster: Cluster) -> None:
        worker, bus = cluster.workers[worker_id], cluster.bus
        process, bus.slow["outcomes"] = worker.process, late_ms

        def on_record(topic: str, record: object, now_ms: float) -> None:
            if isinstance(record, Outcome) and record.written_by == worker_id:
                bus.record_listeners = [
                    listener for listener in bus.record_listeners if listener is not on_record
                ]
                if worker.process is process and bus.slow.pop("outcomes", 0.0):
                    cluster.clock.after(0.0, process.end)
                    back()

        def back() -> None:
            cluster.clock.after(for_ms, lambda: restart(0.0, worker_id).strike(cluster))

        bus.record_listeners.append(on_record)

    return SimFault(at_ms, strike)


def lose_heartbeats(at_ms: float, worker_id: str, for_ms: float) -> SimFault:
    """Lose a worker's heartbeats while it keeps serving; then it notices, and joins again."""

    def notice(cluster: Cluster, process: SimProcess) -> None:
        cluster.members.unheard_workers.discard(worker_id)
        worker = cluster.workers[worker_id]
        if worker.process is process:
            worker.crash()
            worker.restart()
            cluster.members.join(worker)

    def strike(cluster: Cluster) -> None:
        process = cluster.workers[worker_id].process
        if process.alive:
            cluster.members.unheard_workers.add(worker_id)
            cluster.clock.after(for_ms, lambda: notice(cluster, process))

    return SimFault(at_ms, strike)


def drain(at_ms: float, worker_id: str, for_ms: float) -> SimFault:
    """Drain a worker; it leaves after a time and starts again at once."""

    def leave(cluster: Cluster, process: SimProcess) -> None:
        worker = cluster.workers[worker_id]
        if worker.process is process and not worker.is_silent:
            cluster.members.leave(worker)
            worker.restart()
            cluster.members.join(worker)

    def strike(cluster: Cluster) -> None:
        process = cluster.workers[worker_id].process
        if process.alive:
            process.drain()
            cluster.clock.after(for_ms, lambda: leave(cluster, process))

    return SimFault(at_ms, strike)


def hang_up(at_ms: float, share: float) -> SimFault:
    """Let a client with an active request leave; `share` picks it in order of the requests."""

    def strike(cluster: Cluster) -> None:
        waiting = [request for request in cluster.clients.waiting if not request.has_left]
        if waiting:
            leave(cluster, waiting[int(share * len(waiting))].request_id)

    return SimFault(at_ms, strike)


def leave(cluster: Cluster, request_id: str) -> None:
    """Let a client leave; its gateway cancels the work, unless the request keeps running."""
    request = cluster.gateways.hang_up(request_id)
    cluster.clients.stop_reading(request_id)
    if request is not None:
        _give_up(cluster, request)


def _give_up(cluster: Cluster, request: Request) -> None:
    """Cancel a request, as its gateway does when the client has left."""
    if request.keeps_running:
        return
    cancellation = Cancellation(
        request_id=request.request_id,
        session_id=request.session_id,
        reason=CancelReason.CLIENT_GONE,
        at_ms=int(cluster.clock.now_ms),
    )
    cluster.write("cancellations", cancellation, CancellationArrived(cancellation, PARTITION))


def slow_log(at_ms: float, delay_ms: float, for_ms: float) -> SimFault:
    """Delay all records by `delay_ms` for a while."""

    def strike(cluster: Cluster) -> None:
        cluster.bus.delay_ms = delay_ms
        cluster.clock.after(for_ms, lambda: usual(cluster))

    def usual(cluster: Cluster) -> None:
        cluster.bus.delay_ms = cluster.setup.bus_ms

    return SimFault(at_ms, strike)


def lose_router(at_ms: float, sends: int, for_ms: float, *, orders_first: bool = False) -> SimFault:
    """Let the router die after `sends` effects of an event; another one comes `for_ms` later.

    With `orders_first`, it may take a while until such an event comes.
    """

    def take_over(cluster: Cluster) -> None:
        cluster.router.take_over()
        cluster.members.join_router()

    def strike(cluster: Cluster) -> None:
        router = cluster.router
        if not orders_first:
            router.die(sends)
            come_after(cluster)
        elif router.alive:
            epoch = router.epoch
            router.die(sends, orders_first=True, on_death=lambda: come_after(cluster))
            cluster.clock.after(UNMOVED_MS, lambda: give_up(cluster, epoch))

    def come_after(cluster: Cluster) -> None:
        cluster.clock.after(for_ms, lambda: take_over(cluster))

    def give_up(cluster: Cluster, epoch: int) -> None:
        if cluster.router.alive and cluster.router.epoch == epoch:
            take_over(cluster)

    return SimFault(at_ms, strike)


def lose_asking_router(at_ms: float, for_ms: float) -> SimFault:
    """Let the router die at the first moment, from then on, at which requests wait for a search."""

    def strike(cluster: Cluster) -> None:
        router = cluster.router
        if router.alive and router.core.tables.requests.retrieving:
            lose_router(cluster.clock.now_ms, 0, for_ms).strike(cluster)
        elif cluster.clients.open:
            cluster.clock.after(1.0, lambda: strike(cluster))

    return SimFault(at_ms, strike)


def lose_gateway(
    at_ms: float, gateway_id: str, resumed_after_ms: Sequence[float | None]
) -> SimFault:
    """Let a gateway die, unless it is the last one.

    Clients of its answers resume at another gateway after these times, in turn; None: never.
    """

    def strike(cluster: Cluster) -> None:
        gateways = cluster.gateways
        if len(gateways.living) < 2:
            return
        gateway = gateways.by_id[gateway_id]
        if not gateway.alive and not gateway.is_cut:  # it is dead, and its clients have their times
            return
        gateway.alive = gateway.is_cut = False
        for number, answer in enumerate(gateways.answers_at(gateway_id)):
            after_ms = resumed_after_ms[number % len(resumed_after_ms)]
            if after_ms is None:
                cluster.clients.stop_reading(answer.key.parent_id)
            else:
                cluster.clock.after(after_ms, lambda answer=answer: _resume(cluster, answer))  # type: ignore[misc]  # bound now

    return SimFault(at_ms, strike)


def _resume(cluster: Cluster, answer: SimAnswer) -> None:
    """Resume an answer at another gateway."""
    resumption = cluster.gateways.resume(answer)
    cluster.write("cancellations", resumption, ResumptionArrived(resumption, PARTITION))


def restart_gateway(at_ms: float, gateway_id: str) -> SimFault:
    """Restart a dead gateway: a new process, without streams, takes its id."""

    def strike(cluster: Cluster) -> None:
        gateway = cluster.gateways.by_id[gateway_id]
        if not gateway.alive and not gateway.is_cut:
            cluster.members.join_gateway(cluster.gateways.restart(gateway_id))

    return SimFault(at_ms, strike)


def cut_gateway(
    at_ms: float,
    gateway_id: str,
    for_ms: float,
    resumed_after_ms: Sequence[float | None] = (None,),
) -> SimFault:
    """Cut a gateway off from the log for a while (or freeze it); it joins again with its streams.

    Clients of its answers resume at another gateway after these times, in turn, and the gateway
    then finds that they have left; None: they wait.
    """

    def go_elsewhere(cluster: Cluster, cut: SimGateway, answer: SimAnswer) -> None:
        if cut.is_cut and cut.hub.find(answer.key.parent_id) is answer:
            cut.hub.remove(answer)
            _resume(cluster, answer)
            cut.missed.append(answer.request)

    def join_again(cluster: Cluster, cut: SimGateway) -> None:
        if cluster.gateways.by_id[gateway_id] is not cut or not cut.is_cut:
            return  # the gateway has died meanwhile
        cluster.members.join_gateway(cluster.gateways.join_again(gateway_id))
        for request in cut.missed:
            _give_up(cluster, request)
        cut.missed.clear()

    def strike(cluster: Cluster) -> None:
        gateways, clock = cluster.gateways, cluster.clock
        if len(gateways.living) < 2 or not gateways.by_id[gateway_id].alive:
            return
        cut = gateways.by_id[gateway_id]
        cut.alive, cut.is_cut = False, True
        for number, answer in enumerate(gateways.answers_at(gateway_id)):
            after_ms = resumed_after_ms[number % len(resumed_after_ms)]
            if after_ms is not None and after_ms < for_ms:
                clock.after(after_ms, lambda answer=answer: go_elsewhere(cluster, cut, answer))  # type: ignore[misc]  # bound now
        clock.after(for_ms, lambda: join_again(cluster, cut))

    return SimFault(at_ms, strike)


def gateway_losses(
    seed: int, *, gateways: int, count: int, begin_ms: float, end_ms: float
) -> tuple[SimFault, ...]:
    """Return faults at random times: gateways die, start again and are cut off.

    Some clients resume in time, some late, some never.
    """
    draw = np.random.default_rng([seed, count])
    faults = []
    for at_ms in sorted(draw.uniform(begin_ms, end_ms, count).tolist()):
        name = f"gateway-{draw.integers(gateways)}"
        after_ms = [draw.uniform(0.0, 8_000.0) if draw.random() < 0.6 else None for _ in range(7)]
        kind = int(draw.integers(3))
        if kind == 2:
            faults.append(cut_gateway(at_ms, name, draw.uniform(100.0, 3_000.0)))
        else:
            faults.append(lose_gateway(at_ms, name, after_ms))
        if kind == 1:
            faults.append(restart_gateway(at_ms + draw.uniform(100.0, 4_000.0), name))
    return tuple(faults)
