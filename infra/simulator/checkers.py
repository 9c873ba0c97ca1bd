"""Invariants that are watched while a simulated cluster runs, numbered as in ARCHITECTURE.md.

Each keeps books of its own from events and effects alone; it reads none of the router's tables.
"""

from collections import defaultdict
from collections.abc import Sequence

from infra.simulator.cluster import Cluster
from infra.simulator.fleet import credits_of
from infra.simulator.latency import Setup
from schemas.fleet import LEASE_MS
from schemas.records import (
    CancelReason,
    Heartbeat,
    MemberKind,
    Outcome,
    PhaseKind,
    Registration,
    Role,
    Work,
    WorkPhase,
)
from streams.core.effects import Dispatch, Effect, End
from streams.core.events import (
    Event,
    FleetRecordArrived,
    OutcomeArrived,
    PhaseArrived,
    RequestArrived,
    ResumptionArrived,
    Tick,
)


class OneOutcome:
    """[1] Every request ends exactly once, and no work is given out for it after that.

    The outcome of an attempt below one that was given out ends nothing
    (`schemas/rules/outcomes.py`).
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
        self._beats: dict[str, tuple[int, int]] = {}  # epoch and number of the last that counts

    def applied(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        """Keep each worker's book."""
        if isinstance(event, FleetRecordArrived):
            if isinstance(event.record, Heartbeat):
                self._beat(event.record, now_ms)
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

    def _beat(self, beat: Heartbeat, now_ms: float) -> None:
        """Of a former life, or told before, it says nothing."""
        number = (beat.epoch, beat.seq)
        if number > self._beats.get(beat.member_id, (0, -1)):
            self._beats[beat.member_id] = number
            self._heard_ms[beat.member_id] = now_ms

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


class Readers:
    """[7] Nothing runs for gateways that are lost, and nothing ends as lost before that."""

    def __init__(self, grace_ms: int) -> None:
        self._grace_ms = grace_ms
        self._process: dict[str, tuple[str, int]] = {}  # by member id
        self._heard_ms: dict[tuple[str, int], float] = {}
        self._readers: dict[str, set[tuple[str, int]]] = {}  # of requests that depend on some
        self.lost: set[str] = set()

    def applied(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        """Keep the book of who reads what."""
        if isinstance(event, FleetRecordArrived):
            self._heard(event.record, now_ms)
        elif isinstance(event, RequestArrived):
            request = event.request
            if request.gateway_started_ms and not request.keeps_running:
                reader = request.gateway_id, request.gateway_started_ms
                self._readers.setdefault(request.request_id, {reader})
        elif isinstance(event, ResumptionArrived):
            resumed = event.resumption
            if resumed.request_id in self._readers:
                place = resumed.gateway_id, resumed.gateway_started_ms
                self._readers[resumed.request_id].add(place)
        elif isinstance(event, OutcomeArrived):
            self._readers.pop(event.outcome.request_id, None)
        for effect in effects:
            if isinstance(effect, End):
                self._ended(effect.outcome, now_ms)
        if isinstance(event, Tick):
            longest_ms = LEASE_MS + self._grace_ms + 2_000
            late = [each for each in self._readers if self._unread_ms(each, now_ms) > longest_ms]
            assert not late, f"run for nobody: {late}"

    def finished(self, cluster: Cluster) -> None:
        """Nothing more to check."""

    def _heard(self, record: Registration | Heartbeat, now_ms: float) -> None:
        if isinstance(record, Registration) and record.kind is MemberKind.GATEWAY:
            self._process[record.member_id] = record.member_id, record.started_ms
        if record.member_id in self._process:
            self._heard_ms[self._process[record.member_id]] = now_ms

    def _unread_ms(self, request_id: str, now_ms: float) -> float:
        return min(now_ms - self._heard_ms[reader] for reader in self._readers[request_id])

    def _ended(self, outcome: Outcome, now_ms: float) -> None:
        error = outcome.error
        if error is not None and error.message.endswith(CancelReason.GATEWAY_LOST.value):
            self.lost.add(outcome.request_id)
            unread_ms = self._unread_ms(outcome.request_id, now_ms)
            assert unread_ms >= self._grace_ms, f"{outcome.request_id}: read {unread_ms} ms ago"
        self._readers.pop(outcome.request_id, None)
