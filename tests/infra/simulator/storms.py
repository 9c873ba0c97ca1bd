"""Simulated clusters in a storm, under all checkers."""

from collections.abc import Sequence
from dataclasses import replace

from infra.simulator.checkers.answers import AnswerLogChecker, ClientChecker
from infra.simulator.checkers.bounds import Bounds
from infra.simulator.checkers.continuing import ContinuationChecker
from infra.simulator.checkers.credits import Credits, Idle
from infra.simulator.checkers.handles import Handles
from infra.simulator.checkers.readers import Readers
from infra.simulator.checkers.reasons import Reasons
from infra.simulator.checkers.rebuild import Rebuilds
from infra.simulator.checkers.usage import UsageChecker
from infra.simulator.cluster import ORCHESTRATIONS, READY_MS, Checker, Cluster
from infra.simulator.faults.losses import lose_asking_router
from infra.simulator.faults.storm import storm
from infra.simulator.machine.latency import Setup
from infra.simulator.outcomes import OneOutcome
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
                lose_asking_router(READY_MS + at_ms, 700.0)
                for at_ms in (1_000.0, 4_000.0) * searching
            ),
        ],
        searches_seed=seed if searching else None,
        probes=probing,
    )
    cluster.gateways.reads_whole = True
    return serve_all(cluster, PROFILE, per_s=5.0, duration_ms=DURATION_MS, seed=seed)
