"""Gateways that die and are cut off: nothing runs for nobody, and what is read goes on."""

import pytest

from infra.simulator.checkers.credits import Credits
from infra.simulator.checkers.readers import Readers
from infra.simulator.cluster import ORCHESTRATIONS, READY_MS, Cluster, SimFault
from infra.simulator.faults.losses import cut_gateway, gateway_losses, lose_gateway
from infra.simulator.machine.latency import Setup
from infra.simulator.outcomes import OneOutcome
from infra.simulator.shape import ClusterShape
from infra.simulator.traffic.poisson import Profile
from infra.simulator.traffic.poisson import TurnShape as TurnShape
from schemas.records import OutcomeKind
from streams.config import RouterSettings
from streams.core.fleet.readers import ReaderWatch
from streams.core.requests import live
from tests.infra.simulator.serving import serve_all

SETUP = Setup()
DURATION_MS = 12_000.0
GRACE_MS = 3_500  # longer than a cut, less its lease
PROFILE = Profile(
    first=TurnShape(input_tokens=1_000, output_tokens=1_500),  # about ten seconds
    later=TurnShape(input_tokens=200, output_tokens=200),
)


def serve(seed: int, faults: tuple[SimFault, ...], readers: Readers) -> Cluster:
    """Two-turn conversations through three gateways, under all checkers."""
    cluster = Cluster(
        ClusterShape(prefill=2, decode=2),
        SETUP,
        RouterSettings(
            policy="static",
            orchestration=ORCHESTRATIONS[seed % 3].value,
            gateway_grace_ms=GRACE_MS,
            tick_ms=100,
        ),
        checkers=[OneOutcome(), Credits(), readers],
        gateways=3,
        timeout_ms=120_000,
        faults=faults,
    )
    return serve_all(cluster, PROFILE, per_s=5.0, duration_ms=DURATION_MS, seed=seed)


def ends(cluster: Cluster) -> dict[str, OutcomeKind]:
    """How each request ended for its client."""
    return {each.request_id: each.outcome.kind for each in cluster.clients.requests if each.outcome}


@pytest.mark.parametrize("seed", range(6))
def test_what_nobody_reads_ends_once_and_all_else_completes(seed: int) -> None:
    """Gateways die, return and are cut off at drawn times."""
    readers = Readers(GRACE_MS)
    faults = gateway_losses(
        seed, gateways=3, count=8, begin_ms=READY_MS, end_ms=READY_MS + DURATION_MS
    )
    cluster = serve(seed, faults, readers)
    found = ends(cluster)
    assert readers.lost_ids, "some were left by their clients"
    for request_id, kind in found.items():
        expected = (
            OutcomeKind.CANCELLED if request_id in readers.lost_ids else OutcomeKind.COMPLETED
        )
        assert kind is expected, request_id
    for worker in cluster.workers.values():
        state = worker.process.engine.state
        assert (
            not len(worker.process.requests) and not state.computations and not state.cache.pinned
        )


@pytest.mark.parametrize("resumes", [True, False])
def test_clients_that_resume_keep_their_answers(resumes: bool) -> None:
    """All of a gateway's, or none but those that are to go on anyway."""
    readers = Readers(GRACE_MS)
    fault = lose_gateway(READY_MS + 6_000, "gateway-1", (500.0,) if resumes else (None,))
    cluster = serve(1, (fault,), readers)
    assert bool(readers.lost_ids) != resumes
    assert all(kind is OutcomeKind.COMPLETED for kind in ends(cluster).values()) == resumes


def test_a_gateway_that_was_cut_off_keeps_its_streams() -> None:
    """It joins again within the grace, as the same process."""
    readers = Readers(GRACE_MS)
    cluster = serve(2, (cut_gateway(READY_MS + 6_000, "gateway-1", 5_000.0),), readers)
    assert not readers.lost_ids
    assert set(ends(cluster).values()) == {OutcomeKind.COMPLETED}


def frozen() -> SimFault:
    """A gateway sleeps for three seconds; two of three clients go on elsewhere meanwhile."""
    return cut_gateway(READY_MS + 6_000, "gateway-1", 3_000.0, (800.0, None, 1_700.0))


def test_a_gateway_that_wakes_gives_nothing_up_that_is_read_elsewhere() -> None:
    """It finds its clients gone, who have resumed at another long ago."""
    readers = Readers(GRACE_MS)
    cluster = serve(2, (frozen(),), readers)
    assert not readers.lost_ids
    assert set(ends(cluster).values()) == {OutcomeKind.COMPLETED}


def test_a_seed_finds_what_is_given_up_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the mend every word of a gateway counts."""
    monkeypatch.setattr(live, "is_outdated", lambda *_, **__: False)
    with pytest.raises(AssertionError, match="given up while its client reads"):
        serve(2, (frozen(),), Readers(GRACE_MS))


def test_a_seed_finds_work_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the mend it runs to its end."""
    monkeypatch.setattr(ReaderWatch, "lost_gateways", lambda *_: set())
    with pytest.raises(AssertionError, match="run for nobody"):
        serve(1, (lose_gateway(READY_MS + 6_000, "gateway-1", (None,)),), Readers(GRACE_MS))
