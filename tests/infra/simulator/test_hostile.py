"""A log with limits, and records that mean harm: the router goes on, and nobody else suffers."""

from typing import Any

import pytest

from infra.simulator.checkers.credits import Credits
from infra.simulator.cluster import ORCHESTRATIONS, READY_MS, Cluster
from infra.simulator.faults.hostile import OpenCluster, large_request
from infra.simulator.machine.latency import Setup
from infra.simulator.outcomes import OneOutcome
from infra.simulator.shape import ClusterShape
from infra.simulator.traffic.poisson import Profile
from infra.simulator.traffic.poisson import TurnShape as TurnShape
from schemas.errors import RecordError, RecordTooLarge
from schemas.rules.sizes import RECORD_BYTES_MAX, REQUEST_BYTES_MAX
from streams.config import RouterSettings
from tests.infra.simulator.serving import serve_all
from tests.infra.simulator.storms import hostile_faults

SETUP = Setup()
FAULTS = "infra.simulator.faults.hostile"
BROKER_BYTES = 64 << 10  # a broker whose own limit is far below the rule's
DURATION_MS = 4_000.0
PROFILE = Profile(
    first=TurnShape(input_tokens=6_000, output_tokens=40),
    later=TurnShape(input_tokens=200, output_tokens=60),
)


def serve(seed: int, *, count: int = 200) -> OpenCluster:
    """Serve two-turn conversations among harmful records, under all checkers."""
    faults = hostile_faults(
        seed,
        count=count,
        begin_ms=READY_MS,
        end_ms=READY_MS + DURATION_MS,
        record_bytes_max=BROKER_BYTES,
    )
    cluster = OpenCluster(
        ClusterShape(prefill=2, decode=2),
        SETUP,
        RouterSettings(policy="static", orchestration=ORCHESTRATIONS[seed % 3].value),
        checkers=[OneOutcome(), Credits()],
        faults=faults,
        record_bytes_max=BROKER_BYTES,
    )
    serve_all(cluster, PROFILE, per_s=8.0, duration_ms=DURATION_MS, seed=seed)
    return cluster


@pytest.mark.parametrize("seed", range(4))
def test_cluster_fails_only_requests_beyond_log_limit(seed: int) -> None:
    """Each accepted request ends once, and all others complete."""
    cluster = serve(seed)
    kinds: dict[str, set[str]] = {"c": set(), "large": set()}
    for request in cluster.clients.requests:
        outcome, error = request.outcome, request.outcome and request.outcome.error
        kind = "refused" if outcome is None else error.code if error else outcome.kind.value
        kinds[request.request_id.partition("-")[0]].add(kind)
    assert kinds["c"] == {"completed"}
    assert kinds["large"] == {"completed", "refused", RecordTooLarge.code}
    assert cluster.buried, "some reports made no sense"


@pytest.mark.parametrize(
    ("mend", "without", "crash", "seed"),
    [
        (
            "infra.simulator.members.router.unsent_phase",
            lambda *_: None,
            RecordTooLarge,
            2,
        ),  # a failed send ends the router
        (f"{FAULTS}.check_numbers", lambda _: None, (ValueError, OverflowError, RecordError), 2),
        (f"{FAULTS}.check_leases", lambda *_: None, AssertionError, 4),  # nobody sends there
    ],
)
def test_hostile_record_stops_router_without_its_check(
    mend: str, without: Any, crash: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One record is enough to stop the router."""
    monkeypatch.setattr(mend, without)
    with pytest.raises(crash):
        serve(seed)


def test_cluster_serves_requests_within_size_rule() -> None:
    """Records that follow from an accepted request fit the log's own limit."""
    fits = REQUEST_BYTES_MAX - 1_000
    sizes = (fits, fits, REQUEST_BYTES_MAX, RECORD_BYTES_MAX)
    cluster = Cluster(
        ClusterShape(replica=1),
        SETUP,
        RouterSettings(policy="replica"),
        checkers=[OneOutcome(), Credits()],
        record_bytes_max=RECORD_BYTES_MAX,
    )
    cluster.pass_ms(READY_MS)
    for chars in sizes:
        large_request(cluster, chars)
    cluster.run([])
    cluster.finish()
    assert [request.completed for request in cluster.clients.requests] == [True, True, False, False]
    assert [request.refused for request in cluster.clients.requests] == [False, False, True, True]


def test_cluster_measures_no_record_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations have none; a check that ran would raise."""
    monkeypatch.delattr("infra.simulator.log.bus.check_size")
    cluster = Cluster(ClusterShape(replica=1), SETUP, RouterSettings(policy="replica"))
    cluster.pass_ms(READY_MS)
    large_request(cluster, RECORD_BYTES_MAX)
    cluster.run([])
    assert all(request.completed for request in cluster.clients.requests)
