"""Invariant 7: nothing runs for readers that are all lost, and what is read is not ended."""

from collections.abc import Sequence

from infra.simulator.cluster import Checker
from schemas.fleet import LEASE_MS
from schemas.records import CancelReason, Heartbeat, MemberKind, Outcome, Registration
from streams.core.effects import Effect, End
from streams.core.events import (
    Event,
    FleetRecordArrived,
    OutcomeArrived,
    RequestArrived,
    ResumptionArrived,
    Tick,
)


class Readers(Checker):
    """Nothing runs for gateways that are lost, and nothing ends as lost before that."""

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
