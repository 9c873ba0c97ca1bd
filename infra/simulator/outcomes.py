"""Invariant 1: every accepted request ends in exactly one outcome that counts."""

from collections.abc import Sequence

from infra.simulator.cluster import Checker, Cluster
from schemas.records import Work
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
