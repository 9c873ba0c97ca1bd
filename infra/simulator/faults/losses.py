"""Losses and slowdowns in a simulated cluster: each function strikes now."""

from collections.abc import Sequence
from functools import partial

from infra.simulator.cluster import Cluster
from infra.simulator.members.gateways import SimAnswer
from infra.simulator.members.router import PARTITION
from infra.simulator.members.worker import SimWorker
from schemas.records import Cancellation, CancelReason, Outcome, Request
from streams.core.events import CancellationArrived, ResumptionArrived

UNMOVED_MS = 2_500.0  # a router that should die over orders dies without any after this time


def slow_prefill(cluster: Cluster, worker_id: str, times: float) -> None:
    """Make prompts take `times` as long on a worker from now on."""
    cluster.workers[worker_id].process.engine.gpu.slow_prefill = times


def slow_links(cluster: Cluster, times: float) -> None:
    """Make KV transfers take `times` as long from now on."""
    cluster.links.slow = times


def crash(cluster: Cluster, worker_id: str) -> None:
    """End a worker's process with all its state."""
    cluster.workers[worker_id].crash()


def restart(cluster: Cluster, worker_id: str) -> None:
    """Restart a dead worker without state, in a new epoch."""
    worker = cluster.workers[worker_id]
    if not worker.alive:
        _start(cluster, worker)


def _start(cluster: Cluster, worker: SimWorker) -> None:
    """Start a worker's next process, which may serve another model."""
    worker.served = cluster.models.following(worker.worker_id, worker.epoch, worker.served)
    worker.restart()
    cluster.members.join(worker)


def crash_on_outcome(cluster: Cluster, worker_id: str, late_ms: float, for_ms: float) -> None:
    """Crash a worker over its next outcome, which routers read `late_ms` later.

    So they see the worker's next epoch before the outcome. Does nothing if the faults have healed
    by then.
    """
    worker, bus = cluster.workers[worker_id], cluster.bus
    process, bus.slow["outcomes"] = worker.process, late_ms

    def on_record(topic: str, record: object, now_ms: float) -> None:
        if isinstance(record, Outcome) and record.written_by == worker_id:
            bus.record_listeners = [
                listener for listener in bus.record_listeners if listener is not on_record
            ]
            if worker.process is process and bus.slow.pop("outcomes", 0.0):
                cluster.clock.after(0.0, process.end)
                cluster.clock.after(for_ms, lambda: restart(cluster, worker_id))

    bus.record_listeners.append(on_record)


def drain(cluster: Cluster, worker_id: str, for_ms: float) -> None:
    """Drain a worker; it leaves after a time and starts again at once."""
    worker = cluster.workers[worker_id]
    process = worker.process

    def end() -> None:
        if worker.process is process and not worker.is_silent:
            cluster.members.leave(worker)
            _start(cluster, worker)

    if process.alive:
        process.drain()
        cluster.clock.after(for_ms, end)


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


def slow_log(cluster: Cluster, delay_ms: float, for_ms: float) -> None:
    """Delay all records by `delay_ms` for a while."""

    def usual() -> None:
        cluster.bus.delay_ms = cluster.setup.bus_ms

    cluster.bus.delay_ms = delay_ms
    cluster.clock.after(for_ms, usual)


def lose_router(cluster: Cluster, sends: int, for_ms: float, *, orders_first: bool = False) -> None:
    """Let the router die after `sends` effects of an event; another one comes `for_ms` later.

    With `orders_first`, it may take a while until such an event comes.
    """
    router, epoch = cluster.router, cluster.router.epoch

    def take_over() -> None:
        router.take_over()
        cluster.members.join_router()

    def come_after() -> None:
        cluster.clock.after(for_ms, take_over)

    def give_up() -> None:
        if router.alive and router.epoch == epoch:
            take_over()

    if not orders_first:
        router.die(sends)
        come_after()
    elif router.alive:
        router.die(sends, orders_first=True, on_death=come_after)
        cluster.clock.after(UNMOVED_MS, give_up)


def lose_gateway(
    cluster: Cluster, gateway_id: str, resumed_after_ms: Sequence[float | None]
) -> None:
    """Let a gateway die, unless it is the last one.

    Clients of its answers resume at another gateway after these times, in turn; None: never.
    """
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
            cluster.clock.after(after_ms, partial(_resume, cluster, answer))


def _resume(cluster: Cluster, answer: SimAnswer) -> None:
    """Resume an answer at another gateway."""
    resumption = cluster.gateways.resume(answer)
    cluster.write("cancellations", resumption, ResumptionArrived(resumption, PARTITION))


def restart_gateway(cluster: Cluster, gateway_id: str) -> None:
    """Restart a dead gateway: a new process, without streams, takes its id."""
    gateway = cluster.gateways.by_id[gateway_id]
    if not gateway.alive and not gateway.is_cut:
        cluster.members.join_gateway(cluster.gateways.restart(gateway_id))


def cut_gateway(
    cluster: Cluster,
    gateway_id: str,
    for_ms: float,
    resumed_after_ms: Sequence[float | None] = (None,),
) -> None:
    """Cut a gateway off from the log for a while (or freeze it); it joins again with its streams.

    Clients of its answers resume at another gateway after these times, in turn, and the gateway
    then finds that they have left; None: they wait.
    """
    gateways, clock = cluster.gateways, cluster.clock
    cut = gateways.by_id[gateway_id]
    if len(gateways.living) < 2 or not cut.alive:
        return

    def go_elsewhere(answer: SimAnswer) -> None:
        if cut.is_cut and cut.hub.find(answer.key.parent_id) is answer:
            cut.hub.remove(answer)
            _resume(cluster, answer)
            cut.missed.append(answer.request)

    def join_again() -> None:
        if gateways.by_id[gateway_id] is not cut or not cut.is_cut:
            return  # the gateway has died meanwhile
        cluster.members.join_gateway(gateways.join_again(gateway_id))
        for request in cut.missed:
            _give_up(cluster, request)
        cut.missed.clear()

    cut.alive, cut.is_cut = False, True
    for number, answer in enumerate(gateways.answers_at(gateway_id)):
        after_ms = resumed_after_ms[number % len(resumed_after_ms)]
        if after_ms is not None and after_ms < for_ms:
            clock.after(after_ms, partial(go_elsewhere, answer))
    clock.after(for_ms, join_again)
