"""Faults at random times, and simulated clusters in a storm of them, under all checkers."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from infra.simulator.checkers.answers import AnswerLogChecker, ClientChecker
from infra.simulator.checkers.bounds import Bounds
from infra.simulator.checkers.continuing import ContinuationChecker
from infra.simulator.checkers.credits import Credits, Idle
from infra.simulator.checkers.handles import Handles
from infra.simulator.checkers.readers import Readers
from infra.simulator.checkers.rebuild import Rebuilds
from infra.simulator.checkers.usage import UsageChecker
from infra.simulator.cluster import ORCHESTRATIONS, READY_MS, Checker, Cluster, SimFault
from infra.simulator.faults import hostile, losses
from infra.simulator.machine.latency import Setup
from infra.simulator.outcomes import OneOutcome, Reasons
from infra.simulator.shape import ClusterShape
from infra.simulator.traffic.poisson import Profile
from infra.simulator.traffic.poisson import TurnShape as TurnShape
from streams.config import RouterSettings
from streams.core.router import Router
from tests.infra.simulator.serving import serve_all

SHAPES = [ClusterShape.parse(name) for name in ("2P2D", "1P3D", "2B", "1P1D2R")]
SETUP = Setup(ack_ms=2.0, steps_max=4)
PROFILE = Profile(
    first=TurnShape(input_tokens=3_000, output_tokens=120),
    later=TurnShape(input_tokens=400, output_tokens=90),
    turns=3,
    think_ms=300.0,
)
GATEWAYS, GRACE_MS = 3, 3_500
DURATION_MS = 8_000.0


Draw = np.random.Generator
Faults = tuple[SimFault, ...]
NEAR_BYTES = 600  # most bytes of a large request below the limit; its work may fit or not


def times(draw: Draw, count: int, begin_ms: float, end_ms: float) -> list[float]:
    """So many times in order."""
    return sorted(draw.uniform(begin_ms, end_ms, count).tolist())


def repeat_record(draw: Draw, at_ms: float) -> SimFault:
    """Deliver the next record of some topic twice."""
    topic = str(draw.choice(hostile.TOPICS))
    return SimFault(at_ms, lambda cluster: cluster.bus.repeated_topics.add(topic))


def hang_up(cluster: Cluster, share: float) -> None:
    """Let a client with an active request leave; `share` picks it in order of the requests."""
    waiting = [request for request in cluster.clients.waiting if not request.has_left]
    if waiting:
        losses.leave(cluster, waiting[int(share * len(waiting))].request_id)


def lose_heartbeats(cluster: Cluster, worker_id: str, for_ms: float) -> None:
    """Lose a worker's heartbeats while it keeps serving; then it notices, and joins again."""
    worker = cluster.workers[worker_id]
    process = worker.process

    def notice() -> None:
        worker.is_mute = False
        if worker.process is process:
            cluster.members.rejoin(worker)

    if process.alive:
        worker.is_mute = True
        cluster.clock.after(for_ms, notice)


def lose_asking_router(cluster: Cluster, for_ms: float) -> None:
    """Let the router die at the first moment, from now on, at which requests wait for a search."""
    router = cluster.router
    if router.alive and router.core.tables.requests.retrieving:
        losses.lose_router(cluster, 0, for_ms)
    elif cluster.clients.open:
        cluster.clock.after(1.0, lambda: lose_asking_router(cluster, for_ms))


def hostile_faults(
    seed: int, *, count: int, begin_ms: float, end_ms: float, record_bytes_max: int
) -> Faults:
    """Repeated, forged and large records between two times; large ones are near the limit."""
    draw = np.random.default_rng([seed, count])
    kinds: tuple[Callable[[float], SimFault], ...] = (
        lambda at_ms: repeat_record(draw, at_ms),
        lambda at_ms: SimFault(at_ms, hostile.forge_record, draw),
        lambda at_ms: SimFault(
            at_ms, hostile.large_request, record_bytes_max - int(draw.integers(NEAR_BYTES))
        ),
    )
    return tuple(
        kinds[int(draw.integers(len(kinds)))](at_ms)
        for at_ms in times(draw, count, begin_ms, end_ms)
    )


def gateway_losses(
    seed: int, *, gateways: int, count: int, begin_ms: float, end_ms: float
) -> Faults:
    """Gateways die, start again and are cut off; clients resume in time, late or never."""
    draw = np.random.default_rng([seed, count])
    faults = []
    for at_ms in times(draw, count, begin_ms, end_ms):
        name = f"gateway-{draw.integers(gateways)}"
        after_ms = [draw.uniform(0.0, 8_000.0) if draw.random() < 0.6 else None for _ in range(7)]
        kind = int(draw.integers(3))
        if kind == 2:
            for_ms = draw.uniform(100.0, 3_000.0)
            faults.append(SimFault(at_ms, losses.cut_gateway, name, for_ms))
        else:
            faults.append(SimFault(at_ms, losses.lose_gateway, name, after_ms))
        if kind == 1:
            back_ms = at_ms + draw.uniform(100.0, 4_000.0)
            faults.append(SimFault(back_ms, losses.restart_gateway, name))
    return tuple(faults)


def storm(
    seed: int, shape: ClusterShape, *, gateways: int, count: int, begin_ms: float, end_ms: float
) -> Faults:
    """So many faults of all kinds between two times, for a cluster that keeps its log."""
    draw = np.random.default_rng([seed, count])
    workers = [name for name, _ in shape.roles()]

    def uniform(low: float, high: float) -> float:
        return float(draw.uniform(low, high))

    def lose_worker(at_ms: float) -> Faults:
        name = str(draw.choice(workers))
        back_ms = at_ms + uniform(100.0, 4_000.0)
        return SimFault(at_ms, losses.crash, name), SimFault(back_ms, losses.restart, name)

    def lose_a_gateway(at_ms: float) -> Faults:
        name = f"gateway-{draw.integers(gateways)}"
        after_ms = [uniform(0.0, 8_000.0) if draw.random() < 0.6 else None for _ in range(7)]
        back_ms = at_ms + uniform(100.0, 4_000.0)
        return (
            SimFault(at_ms, losses.lose_gateway, name, after_ms),
            SimFault(back_ms, losses.restart_gateway, name),
        )

    def cut_gateway(at_ms: float) -> Faults:
        name = f"gateway-{draw.integers(gateways)}"
        return (SimFault(at_ms, losses.cut_gateway, name, uniform(100.0, 3_000.0)),)

    def drain(at_ms: float) -> Faults:
        return (SimFault(at_ms, losses.drain, str(draw.choice(workers)), uniform(50.0, 3_000.0)),)

    def slow_log(at_ms: float) -> Faults:
        return (SimFault(at_ms, losses.slow_log, uniform(5.0, 80.0), uniform(100.0, 2_000.0)),)

    def lose_router(at_ms: float) -> Faults:
        sends = int(draw.integers(4))
        return (SimFault(at_ms, losses.lose_router, sends, uniform(200.0, 2_500.0)),)

    kinds: tuple[Callable[[float], Faults], ...] = (
        *(lose_worker, drain),
        lambda at_ms: tuple(SimFault(at_ms, hang_up, float(draw.random())) for _ in range(3)),
        lambda at_ms: (repeat_record(draw, at_ms),),
        lambda at_ms: (repeat_record(draw, at_ms),),
        *(slow_log, lose_router, lose_a_gateway, cut_gateway),
    )
    return tuple(
        fault
        for at_ms in times(draw, count, begin_ms, end_ms)
        for fault in kinds[int(draw.integers(len(kinds)))](at_ms)
    )


def weathered(
    seed: int,
    *,
    count: int = 16,
    extra_checkers: Sequence[Checker] = (),
    timeout_ms: int = 0,
    searching: bool = False,
    probing: bool = False,
    policy: str = "",
) -> Cluster:
    """Serve conversations in a storm; `searching` also kills routers, `probing` adds probes."""
    shape = SHAPES[seed % len(SHAPES)]
    settings = RouterSettings(
        policy=policy or ("static", "learned", "conditional")[seed % 3],
        local_share=0.3,
        orchestration=("auto", *(orchestration.value for orchestration in ORCHESTRATIONS))[
            seed % 4
        ],
        gateway_grace_ms=GRACE_MS,
        tick_ms=50,
    )
    end_ms = READY_MS + DURATION_MS
    cluster = Cluster(
        shape,
        replace(SETUP, prefill_running_max=seed % 3),
        settings,
        timeout_ms=timeout_ms or (1_200 if seed % 5 == 4 else 60_000),
        gateways=GATEWAYS,
        keeps_log=True,
        checkers=[
            *(
                OneOutcome(),
                Reasons(),
                AnswerLogChecker(),
                ClientChecker(),
                Credits(),
                Idle(),
                Handles(),
            ),
            *(
                Readers(GRACE_MS),
                Bounds(settings.queue_requests_max),
                UsageChecker(),
                ContinuationChecker(),
            ),
            Rebuilds(lambda name: Router(name, settings)),
            *extra_checkers,
        ],
        faults=[
            *storm(seed, shape, gateways=GATEWAYS, count=count, begin_ms=READY_MS, end_ms=end_ms),
            *(
                SimFault(READY_MS + at_ms, lose_asking_router, 700.0)
                for at_ms in (1_000.0, 4_000.0) * searching
            ),
        ],
        searches_seed=seed if searching else None,
        probes=probing,
    )
    cluster.gateways.reads_whole = True
    return serve_all(cluster, PROFILE, per_s=5.0, duration_ms=DURATION_MS, seed=seed)
