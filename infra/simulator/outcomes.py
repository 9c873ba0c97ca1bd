"""Invariant 1: every accepted request ends in exactly one outcome that counts."""

from collections.abc import Sequence

from infra.simulator.cluster import Checker, Cluster
from schemas.records import Work
from streams.core.effects import Dispatch, Effect, End
from streams.core.events import Event, OutcomeArrived, RequestArrived


class OneOutcome(Checker):
    """Every request ends exactly once, and no work is given out for it after that.

    The outcome of an attempt below one that was given out ends nothing, as in
    `schemas/rules/outcomes.py`.
    """

    def __init__(self) -> None:
        self._attempts: dict[str, int] = {}  # the highest that was given out
        self.accepted: set[str] = set()
        self.ended: set[str] = set()

    def applied(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        """Count requests in and outcomes out."""
        if isinstance(event, RequestArrived):
            self.accepted.add(event.request.request_id)
        elif isinstance(event, OutcomeArrived):
            outcome = event.outcome
            if outcome.attempt >= self._attempts.get(outcome.request_id, 0):
                self.ended.add(outcome.request_id)
        for effect in effects:
            if isinstance(effect, End):
                request_id = effect.outcome.request_id
                assert request_id not in self.ended, f"{request_id}: a second outcome"
                self.ended.add(request_id)
            elif isinstance(effect, Dispatch) and isinstance(effect.record, Work):
                request_id = effect.record.request_id
                assert request_id not in self.ended, f"{request_id}: work after its outcome"
                self._attempts[request_id] = effect.record.attempt

    def finished(self, cluster: Cluster) -> None:
        """Everything has ended, at the router and at the clients."""
        lost = self.accepted - self.ended
        assert not lost, f"requests without an outcome: {sorted(lost)}"
        without = [each.request_id for each in cluster.clients.served if each.ended_ms is None]
        assert not without, f"clients that still wait: {without}"
        refused = {each.request_id for each in cluster.clients.served if each.refused}
        assert not refused & self.accepted, "accepted, and refused to the client"
