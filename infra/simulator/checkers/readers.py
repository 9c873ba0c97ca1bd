"""Invariant 7: no request runs when all its readers are lost, and none with a reader is cancelled.

The outcome of an attempt below the latest dispatched one ends nothing, as in `outcomes.py`.
"""

from collections import defaultdict
from collections.abc import Sequence

from infra.simulator.cluster import Checker, Cluster
from schemas.fleet import DEAF_MS, LEASE_MS
from schemas.records import (
    CancelReason,
    Heartbeat,
    MemberKind,
    Outcome,
    Reason,
    Registration,
    Work,
)
from streams.core.effects import Decide, Dispatch, Effect, End
from streams.core.events import (
    CancellationArrived,
    Event,
    FleetRecordArrived,
    OutcomeArrived,
    PartitionReady,
    RequestArrived,
    ResumptionArrived,
    Tick,
)


class Readers(Checker):
    """No request runs for lost gateways, and none ends as lost before that."""

    def __init__(self, grace_ms: int) -> None:
        self._grace_ms = grace_ms
        self._process: dict[str, tuple[str, int]] = {}  # by member id
        self._heard_ms: dict[tuple[str, int], float] = {}
        self._readers: dict[str, set[tuple[str, int]]] = {}  # by request that needs one
        self._resumed: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        self._attempts: dict[str, int] = {}  # the highest dispatched one, by request
        self._ended_ids: set[str] = set()
        self._given_up: set[str] = set()  # cancelled by their gateways
        self._begun_ms = 0.0  # start of the router, or of fleet records after a silence
        self._fleet_ms = 0.0  # time of the last fleet record
        self.lost_ids: set[str] = set()

    def on_event(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        """Update the readers of each request, and check them."""
        if isinstance(event, FleetRecordArrived):
            if now_ms - self._fleet_ms > DEAF_MS:
                self._begun_ms = now_ms
            self._fleet_ms = now_ms
            self._on_fleet_record(event.record, now_ms)
        elif isinstance(event, RequestArrived):
            request = event.request
            has_ended = request.request_id in self._ended_ids
            if request.gateway_started_ms and not request.keeps_running and not has_ended:
                reader = request.gateway_id, request.gateway_started_ms
                self._readers.setdefault(request.request_id, {reader})
        elif isinstance(event, ResumptionArrived):
            resumed = event.resumption
            place = resumed.gateway_id, resumed.gateway_started_ms
            self._resumed[resumed.request_id].add(place)
        elif isinstance(event, OutcomeArrived):
            outcome = event.outcome
            if outcome.attempt >= self._attempts.get(outcome.request_id, 0):
                self._close(outcome.request_id)
        elif isinstance(event, CancellationArrived):  # the worker gets a cancellation and ends it
            self._close(event.cancellation.request_id)
        elif isinstance(event, PartitionReady):
            self._begun_ms = now_ms
        for effect in effects:
            if isinstance(effect, End):
                self._check_end(effect.outcome, now_ms)
            elif isinstance(effect, Decide):
                if effect.decision.reason is Reason.CLIENT_GONE:
                    self._given_up.add(effect.decision.request_id)
            elif isinstance(effect, Dispatch) and isinstance(effect.record, Work):
                self._attempts[effect.record.request_id] = effect.record.attempt
        if isinstance(event, Tick):
            longest_ms = LEASE_MS + self._grace_ms + 2_000
            waited_ms = now_ms - self._begun_ms
            late = [
                request_id
                for request_id in self._readers
                if min(waited_ms, self._unread_ms(request_id, now_ms)) > longest_ms
            ]
            assert not late, f"run for nobody: {late}"

    def _on_fleet_record(self, record: Registration | Heartbeat, now_ms: float) -> None:
        if isinstance(record, Registration) and record.kind is MemberKind.GATEWAY:
            self._process[record.member_id] = record.member_id, record.started_ms
        if record.member_id in self._process:
            self._heard_ms[self._process[record.member_id]] = now_ms

    def _unread_ms(self, request_id: str, now_ms: float) -> float:
        readers = self._readers[request_id] | self._resumed[request_id]
        # A gateway that registers after its requests have arrived counts from then on.
        return min(now_ms - self._heard_ms.setdefault(reader, now_ms) for reader in readers)

    def on_finish(self, cluster: Cluster) -> None:
        """Check that no request was cancelled whose client reads on."""
        for request in cluster.clients.requests:
            is_read = not request.has_left and not request.completed
            wrong = is_read and request.request_id in self._given_up
            assert not wrong, f"{request.request_id}: given up while its client reads"

    def _close(self, request_id: str) -> None:
        self._ended_ids.add(request_id)
        self._readers.pop(request_id, None)

    def _check_end(self, outcome: Outcome, now_ms: float) -> None:
        error = outcome.error
        if error is not None and error.message.endswith(CancelReason.GATEWAY_LOST.value):
            self.lost_ids.add(outcome.request_id)
            unread_ms = self._unread_ms(outcome.request_id, now_ms)
            assert unread_ms >= self._grace_ms, f"{outcome.request_id}: read {unread_ms} ms ago"
        self._close(outcome.request_id)
