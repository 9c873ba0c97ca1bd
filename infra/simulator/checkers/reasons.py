"""Invariant 1, continued: every request ends for a reason, in time."""

from infra.simulator.cluster import Checker, Cluster
from schemas.records import Cancellation, Outcome, OutcomeKind, Request

LATE_MS = 15_000  # no client waits this long after the deadline


class Reasons(Checker):
    """An attempt has one outcome, every cancellation or expiry has a cause, and no client waits
    forever."""

    def __init__(self, skew_ms: float = 0.0) -> None:
        """`skew_ms` is the largest error of workers' clocks."""
        self._skew_ms = skew_ms
        self._outcomes: dict[tuple[str, int], Outcome] = {}
        self._deadlines_ms: dict[str, int] = {}
        self._given_up: set[str] = set()

    def on_record(self, topic: str, record: object, now_ms: float) -> None:
        """Note deadlines and cancellations, and check outcomes."""
        if isinstance(record, Request):
            self._deadlines_ms[record.request_id] = record.deadline_ms
        elif isinstance(record, Cancellation):
            self._given_up.add(record.request_id)
        elif isinstance(record, Outcome) and record.request_id in self._deadlines_ms:
            self._check_outcome(record, now_ms)

    def _check_outcome(self, outcome: Outcome, now_ms: float) -> None:
        name, request_id = (outcome.request_id, outcome.attempt), outcome.request_id
        first_outcome = self._outcomes.setdefault(name, outcome)
        assert first_outcome == outcome, f"{name}: two outcomes, {first_outcome} and {outcome}"
        if outcome.kind is OutcomeKind.CANCELLED and outcome.error is None:
            assert request_id in self._given_up, f"{name}: cancelled, and nobody asked for it"
        if outcome.kind is OutcomeKind.EXPIRED:
            due_ms = self._deadlines_ms[request_id] - self._skew_ms
            assert now_ms >= due_ms, f"{name}: expired before its deadline"

    def on_tick(self, cluster: Cluster) -> None:
        """Check that no client waits long after its deadline."""
        for request in cluster.clients.waiting:
            late_ms = cluster.clock.now_ms - self._deadlines_ms[request.request_id]
            assert late_ms < LATE_MS, f"{request.request_id}: its client waits for ever"
