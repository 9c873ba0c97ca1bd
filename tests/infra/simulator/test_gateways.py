"""Gateways that die and are cut off: nothing runs for nobody, and what is read goes on."""

from collections.abc import Sequence

import pytest

from infra.simulator.checkers.credits import Credits
from infra.simulator.checkers.readers import Readers
from infra.simulator.cluster import ORCHESTRATIONS, READY_MS, Cluster, SimFault
from infra.simulator.faults.losses import cut_gateway, lose_gateway
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
from tests.infra.simulator.storms import gateway_losses

SETUP = Setup()
DURATION_MS = 12_000.0
GRACE_MS = 3_500  # longer than a cut, less its lease
PROFILE = Profile(
    first=TurnShape(input_tokens=1_000, output_tokens=1_500),  # about ten seconds
    later=TurnShape(input_tokens=200, output_tokens=200),
)


def serve(seed: int, faults: tuple[SimFault, ...], readers: Readers) -> Cluster:
    """Serve two-turn conversations through three gateways, under all checkers."""
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
    """Return how each request ended for its client."""
    return {
        request.request_id: request.outcome.kind
        for request in cluster.clients.requests
        if request.outcome
    }


@pytest.mark.parametrize("seed", range(6))
def test_router_cancels_exactly_requests_without_reader(seed: int) -> None:
    """Gateways die, return and are cut off at random times."""
    readers = Readers(GRACE_MS)
    faults = gateway_losses(
        seed, gateways=3, count=8, begin_ms=READY_MS, end_ms=READY_MS + DURATION_MS
    )
    cluster = serve(seed, faults, readers)
    kinds = ends(cluster)
    assert readers.lost_ids, "some were left by their clients"
    for request_id, kind in kinds.items():
        expected = (
            OutcomeKind.CANCELLED if request_id in readers.lost_ids else OutcomeKind.COMPLETED
        )
        assert kind is expected, request_id
    for worker in cluster.workers.values():
        state = worker.process.engine.state
        assert (
            not len(worker.process.requests) and not state.computations and not state.cache.pinned
        )


def gateway_loss(resumed_after_ms: Sequence[float | None]) -> SimFault:
    """Lose a gateway, whose clients resume after these times."""
    return SimFault(READY_MS + 6_000, lose_gateway, "gateway-1", resumed_after_ms)


@pytest.mark.parametrize("resumes", [True, False])
def test_resuming_clients_keep_their_answers(resumes: bool) -> None:
    """All clients of a lost gateway resume, or none does."""
    readers = Readers(GRACE_MS)
    cluster = serve(1, (gateway_loss((500.0,) if resumes else (None,)),), readers)
    assert bool(readers.lost_ids) != resumes
    assert all(kind is OutcomeKind.COMPLETED for kind in ends(cluster).values()) == resumes


def test_gateway_cut_off_within_grace_keeps_its_streams() -> None:
    """The gateway joins again as the same process."""
    readers = Readers(GRACE_MS)
    cluster = serve(2, (SimFault(READY_MS + 6_000, cut_gateway, "gateway-1", 5_000.0),), readers)
    assert not readers.lost_ids
    assert set(ends(cluster).values()) == {OutcomeKind.COMPLETED}


def frozen() -> SimFault:
    """Let a gateway sleep for 3 s, while two of three clients resume elsewhere."""
    resumed_after_ms = (800.0, None, 1_700.0)
    return SimFault(READY_MS + 6_000, cut_gateway, "gateway-1", 3_000.0, resumed_after_ms)


def test_waking_gateway_cancels_nothing_that_is_read_elsewhere() -> None:
    """Its clients are gone, and have resumed at another gateway long before."""
    readers = Readers(GRACE_MS)
    cluster = serve(2, (frozen(),), readers)
    assert not readers.lost_ids
    assert set(ends(cluster).values()) == {OutcomeKind.COMPLETED}


def test_readers_checker_finds_cancellation_of_read_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check for outdated records every record of a gateway counts."""
    monkeypatch.setattr(live, "is_outdated", lambda *_, **__: False)
    with pytest.raises(AssertionError, match="given up while its client reads"):
        serve(2, (frozen(),), Readers(GRACE_MS))


def test_readers_checker_finds_work_without_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the watch on gateways the work runs to its end."""
    monkeypatch.setattr(ReaderWatch, "lost_gateways", lambda *_: set())
    with pytest.raises(AssertionError, match="run for nobody"):
        serve(1, (gateway_loss((None,)),), Readers(GRACE_MS))
