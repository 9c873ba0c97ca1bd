"""Runs a seed: safety while faults strike, liveness after they have healed.

A violation is an AssertionError of a checker, or any exception of the code under test.
"""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.simulator.checkers.answers import AnswerLogChecker, AttemptNumbers, ClientChecker
from infra.simulator.checkers.bounds import Bounds
from infra.simulator.checkers.contexts import Contexts
from infra.simulator.checkers.continuing import ContinuationChecker
from infra.simulator.checkers.credits import Credits, Idle
from infra.simulator.checkers.handles import Handles
from infra.simulator.checkers.models import ModelRecords, ModelWaits
from infra.simulator.checkers.probes import ProbeChecker, Repeats
from infra.simulator.checkers.readers import Readers
from infra.simulator.checkers.rebuild import Rebuilds
from infra.simulator.checkers.usage import UsageChecker
from infra.simulator.cluster import Checker, Cluster
from infra.simulator.faults.aiming import Aim, StrikeCounts
from infra.simulator.faults.hostile import OpenCluster
from infra.simulator.faults.kinds import heal
from infra.simulator.faults.members import SKEW_MS_MAX
from infra.simulator.models import TwoModels
from infra.simulator.outcomes import OneOutcome, Reasons
from infra.simulator.scenarios.scenario import GRACE_MS, HEALED_MS, LATE, Scenario
from schemas.records import OutcomeKind
from streams.core.router import Router

SERVED_MS = 15_000.0  # longest wait of a request after the faults have healed
# After healing, a request may still be shed from a long queue, or expire by a short deadline.
_MAY_END = (OutcomeKind.COMPLETED, OutcomeKind.SHED, OutcomeKind.EXPIRED)
_LOOK_MS = 500.0
STEPS_MAX = 1_000_000  # of the clock; a run with more makes no progress


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedVerdict:
    """The result of running one seed."""

    seed: int
    violation: str = ""  # empty: none
    where: str = ""  # file:line of the code under test or of a checker
    reached: StrikeCounts
    requests: int
    simulated_ms: float


def run(scenario: Scenario) -> SeedVerdict:
    """Run one scenario from its start to its end."""
    aim, violation, where = Aim(scenario.plan, scenario.seed), "", ""
    cluster = _cluster(scenario, aim)
    aim.begin(cluster)
    try:
        _serve(cluster, scenario, aim)
    except Exception as error:  # any exception is a finding of the seed
        violation = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
    return SeedVerdict(
        seed=scenario.seed,
        violation=violation,
        where=where,
        reached=aim.reached,
        requests=len(cluster.clients.requests),
        simulated_ms=cluster.clock.now_ms,
    )


def _cluster(scenario: Scenario, aim: Aim) -> Cluster:
    cluster = OpenCluster(
        scenario.shape,
        scenario.setup,
        scenario.settings,
        timeout_ms=scenario.timeout_ms,
        gateways=scenario.gateways,
        keeps_log=True,
        record_bytes_max=scenario.record_bytes_max,
        searches_seed=scenario.seed if scenario.searches else None,
        probes=scenario.probes,
        models=TwoModels(scenario.shape, scenario.seed) if scenario.several_models else None,
        checkers=[*_checkers(scenario), aim],
    )
    cluster.gateways.reads_whole = True
    return cluster


def _checkers(scenario: Scenario) -> Sequence[Checker]:
    settings = scenario.settings
    always = (OneOutcome(), Reasons(SKEW_MS_MAX), AnswerLogChecker(), ClientChecker())
    workers = (Credits(), Idle(), Handles(), Bounds(settings.queue_requests_max))
    records = (Readers(GRACE_MS), UsageChecker(), ContinuationChecker(), AttemptNumbers())
    searches = (Contexts(),) if scenario.searches else ()
    probes = (ProbeChecker(), Repeats()) if scenario.probes else ()
    models = (ModelRecords(), ModelWaits()) if scenario.several_models else ()
    rebuilds = Rebuilds(lambda name: Router(name, settings))
    return (*always, *workers, *records, *searches, *probes, *models, rebuilds)


def _serve(cluster: Cluster, scenario: Scenario, aim: Aim) -> None:
    cluster.clients.start([*scenario.clients, *scenario.late])
    steps = _run_to(cluster, HEALED_MS, 0)
    aim.end()
    steps = _run_to(cluster, cluster.bus.held_until_ms, steps)  # the bus delivers held records then
    healed_ms = cluster.clock.now_ms
    heal(cluster)
    while _goes_on(cluster):
        steps = _run_to(cluster, cluster.clock.now_ms + _LOOK_MS, steps)
        late = _late(cluster, healed_ms)
        assert not late, f"not served {SERVED_MS:.0f} ms after the last fault: {late}"
    for request in cluster.clients.requests:
        if request.session_id.startswith(LATE):
            kind = OutcomeKind.FAILED if request.outcome is None else request.outcome.kind
            assert kind in _MAY_END, f"{request.request_id}: all was well, and it ended as {kind}"
    cluster.finish()


def _late(cluster: Cluster, healed_ms: float) -> list[str]:
    """Return the ids of requests that waited too long, at clients and at the router."""
    sent_ms_by_id = {request.request_id: request.sent_ms for request in cluster.clients.waiting}
    for live in cluster.router.core.tables.requests.by_id.values():
        sent_ms_by_id.setdefault(live.request_id, live.request.arrived_ms)
    since_ms = cluster.clock.now_ms - SERVED_MS
    return [name for name, at_ms in sent_ms_by_id.items() if max(at_ms, healed_ms) < since_ms]


def _goes_on(cluster: Cluster) -> bool:
    """Return whether any request has still to end, also one that no client waits for."""
    return cluster.is_busy or bool(cluster.router.core.tables.requests.by_id)


def _run_to(cluster: Cluster, at_ms: float, steps: int) -> int:
    """Run to a time, or until no request is left; return the number of steps so far."""
    while _goes_on(cluster) and cluster.clock.now_ms < at_ms and cluster.clock.step():
        steps += 1
        assert steps < STEPS_MAX, f"time stands still at {cluster.clock.now_ms:.0f} ms"
    return steps
