"""Invariants that are watched while a simulated cluster runs, numbered as in ARCHITECTURE.md.

Each keeps books of its own from events and effects alone; it reads none of the router's tables.
"""

from collections import defaultdict
from collections.abc import Sequence

from infra.simulator.cluster import Cluster
from infra.simulator.fleet import credits_of
from infra.simulator.latency import Setup
from schemas.fleet import LEASE_MS
from schemas.records import Heartbeat, Outcome, PhaseKind, Role, Work, WorkPhase
from streams.core.effects import Dispatch, Effect, End
from streams.core.events import (
    Event,
    FleetRecordArrived,
    OutcomeArrived,
    PhaseArrived,
    RequestArrived,
)


class OneOutcome:
    """[1] Every request ends exactly once, and no work is given out for it after that.

    The outcome of an attempt below one that was given out ends nothing (`schemas/outcomes.py`).
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


class Credits:
    """[3] Never more work on a worker than it granted, and none to one that is silent."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._held: dict[tuple[str, Role], set[str]] = defaultdict(set)
        self._heard_ms: dict[str, float] = {}

    def applied(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        """Keep each worker's book."""
        if isinstance(event, FleetRecordArrived):
            if isinstance(event.record, Heartbeat):
                self._heard_ms[event.record.member_id] = now_ms
        elif isinstance(event, OutcomeArrived):
            self._gone(event.outcome)
        elif isinstance(event, PhaseArrived) and event.phase.kind in (
            PhaseKind.PREFILL_DONE,
            PhaseKind.FAILED,
            PhaseKind.REFUSED,
        ):
            key = f"{event.phase.request_id}.{event.phase.attempt}"
            for role in Role:
                self._held[event.phase.worker_id, role].discard(key)
        for effect in effects:
            if isinstance(effect, Dispatch) and isinstance(effect.record, Work):
                self._given(effect.record, now_ms)
            elif isinstance(effect, End):
                self._gone(effect.outcome)

    def finished(self, cluster: Cluster) -> None:
        """Nothing more to check."""

    def _given(self, work: Work, now_ms: float) -> None:
        for held in self._held.values():  # a new attempt voids what others hold of it
            held.difference_update(
                [key for key in held if _older(key, work.request_id, work.attempt)]
            )
        role = Role.PREFILL if work.phase is WorkPhase.PREFILL else Role.DECODE
        held = self._held[work.worker_id, role]
        held.add(f"{work.request_id}.{work.attempt}")
        most = credits_of(self._setup, role)
        assert len(held) <= most, f"{work.worker_id}: {len(held)} requests, {most} granted"
        silent_ms = now_ms - self._heard_ms[work.worker_id]
        assert silent_ms <= LEASE_MS, f"{work.worker_id}: work after {silent_ms} ms of silence"

    def _gone(self, outcome: Outcome) -> None:
        """Nobody holds the outcome's attempt any more, nor one before it."""
        for held in self._held.values():
            held.difference_update(
                [key for key in held if _older(key, outcome.request_id, outcome.attempt + 1)]
            )


def _older(key: str, request_id: str, attempt: int) -> bool:
    name, _, number = key.rpartition(".")
    return name == request_id and int(number) < attempt
