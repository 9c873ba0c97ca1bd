"""Invariant 1: every accepted request ends in exactly one outcome that counts, for a reason."""

from collections.abc import Sequence

from infra.simulator.cluster import Checker, Cluster
from schemas.records import Cancellation, Outcome, OutcomeKind, Request, Work
from streams.core.effects import Dispatch, Effect, End
from streams.core.events import Event, OutcomeArrived, RequestArrived


class OneOutcome(Checker):
    """Checks that every request ends exactly once, and that no work is dispatched after that.

    The outcome of an attempt below the latest dispatched one ends nothing, as in
    `schemas/rules/outcomes.py`.
    """

    def __init__(self) -> None:
        self._attempts: dict[str, int] = {}  # the highest dispatched one, by request
        self.accepted_ids: set[str] = set()
        self.ended_ids: set[str] = set()

    def on_event(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        """Note accepted requests, and check outcomes and work."""
        if isinstance(event, RequestArrived):
            self.accepted_ids.add(event.request.request_id)
        elif isinstance(event, OutcomeArrived):
            outcome = event.outcome
            if outcome.attempt >= self._attempts.get(outcome.request_id, 0):
                self.ended_ids.add(outcome.request_id)
        for effect in effects:
            if isinstance(effect, End):
                request_id = effect.outcome.request_id
                assert request_id not in self.ended_ids, f"{request_id}: a second outcome"
                self.ended_ids.add(request_id)
            elif isinstance(effect, Dispatch) and isinstance(effect.record, Work):
                request_id = effect.record.request_id
                assert request_id not in self.ended_ids, f"{request_id}: work after its outcome"
                self._attempts[request_id] = effect.record.attempt

    def on_finish(self, cluster: Cluster) -> None:
        """Check that every request has ended, at the router and at its client."""
        unfinished_ids = self.accepted_ids - self.ended_ids
        assert not unfinished_ids, f"requests without an outcome: {sorted(unfinished_ids)}"
        waiting_ids = [
            request.request_id for request in cluster.clients.requests if request.ended_ms is None
        ]
        assert not waiting_ids, f"clients that still wait: {waiting_ids}"
        refused_ids = {
            request.request_id for request in cluster.clients.requests if request.refused
        }
        assert not refused_ids & self.accepted_ids, "accepted, and refused to the client"


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
