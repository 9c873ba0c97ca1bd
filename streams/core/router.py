"""The router's state machine: `Router.apply(event, now_ms) -> effects`.

Takes events to what they concern: a placed request's to `streams/core/handlers/attempts.py`,
placing and ending are `streams/core/handlers/dispatch.py`'s. Repeated and stale records lead to
nothing. Pure and deterministic: the same events at the same times give the same effects, which
recovery, replay and simulation stand on. Called by `streams/agents/router.py`.
"""

from collections.abc import Callable, Iterable
from typing import Any

from schemas.records import CancelReason, DecisionKind, Outcome, OutcomeKind, Reason, Session
from streams.config import RouterSettings
from streams.core.effects import Decide, Effect, Forget, SaveSession
from streams.core.events import (
    CancellationArrived,
    Event,
    FleetRecordArrived,
    KvEventsArrived,
    OutcomeArrived,
    PartitionLost,
    PartitionReady,
    PartitionTaken,
    PhaseArrived,
    Placed,
    RequestArrived,
    ResumptionArrived,
    SessionLoaded,
    Tick,
)
from streams.core.fleet.members import Life
from streams.core.fleet.readers import Gateways
from streams.core.handlers import decisions, observations
from streams.core.handlers.attempts import Attempts
from streams.core.handlers.dispatch import Dispatcher
from streams.core.handlers.orders import DECODERS
from streams.core.placement.ppd_table import Table
from streams.core.requests.live import Live, State, may_cancel
from streams.core.requests.recovery import Rebuild, arrived

_SWEEP_MS = 1_000


class Router:
    """All state of the partitions that this router owns."""

    def __init__(
        self, router_id: str, settings: RouterSettings, table: Table | None = None
    ) -> None:
        """`table` is what the policy of that name looks up."""
        self.router_id = router_id
        self.dispatcher = Dispatcher(router_id, settings, table)
        self.attempts = Attempts(self.dispatcher, settings)
        self.settings = settings
        self.gateways = Gateways(self.dispatcher.fleet, settings.gateway_grace_ms)
        self.owned: set[int] = set()
        self._rebuilds: dict[int, Rebuild] = {}
        self._swept_ms = 0
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            RequestArrived: self._request_arrived,
            CancellationArrived: self._cancellation_arrived,
            ResumptionArrived: self._resumption_arrived,
            PhaseArrived: self._phase_arrived,
            OutcomeArrived: self._outcome_arrived,
            FleetRecordArrived: self._fleet_record_arrived,
            KvEventsArrived: self._kv_events_arrived,
            PartitionTaken: self._partition_taken,
            PartitionReady: self._partition_ready,
            PartitionLost: self._partition_lost,
            Tick: self._tick,
            SessionLoaded: self._known_already,
            Placed: self._known_already,
        }

    def apply(self, event: Event, now_ms: int) -> list[Effect]:
        """Take one event in; what is to be done about it, in order."""
        partition = getattr(event, "partition", None)
        if partition in self._rebuilds and not isinstance(event, PartitionReady | PartitionLost):
            self._rebuilds[partition].add(event)  # type: ignore[arg-type]  # has a partition
            return []
        if partition is not None and partition not in self.owned:
            if not isinstance(event, PartitionTaken):
                return []
        self.dispatcher.at_work = None
        self._handlers[type(event)](event, now_ms)
        return self.dispatcher.take_out()

    def blame(self, now_ms: int) -> list[Effect]:
        """After `apply` raised: count a failed try of the request that it was at work on.

        This router is of no use any more. The next one reads the decision, and ends the request
        when it was tried `apply_tries_max` times, so that no record stops routers for ever.
        """
        live = self.dispatcher.at_work
        if live is None:
            return []
        record = decisions.decision(
            self.router_id,
            live,
            DecisionKind.FAIL,
            Reason.ROUTER_RESTARTED,
            self.settings.policy,
            now_ms,
            queue_length=len(self.dispatcher.admission),
        )
        return [Decide(record, live.partition)]

    @property
    def rebuilt(self) -> set[int]:
        """The partitions whose live requests it knows."""
        return self.owned - self._rebuilds.keys()

    def _known_already(self, event: SessionLoaded | Placed, now_ms: int) -> None:
        """Of what this router wrote itself it learns nothing once it has the partition."""

    def _find(self, request_id: str) -> Live | None:
        """The live request that the event is about."""
        live = self.dispatcher.at_work = self.dispatcher.table.live.get(request_id)
        return live

    def view(self) -> dict[str, tuple[object, ...]]:
        """Live requests as comparable values, by id."""
        table = self.dispatcher.table
        return {request_id: table.live[request_id].view() for request_id in sorted(table.live)}

    def _request_arrived(self, event: RequestArrived, now_ms: int) -> None:
        request, table = event.request, self.dispatcher.table
        if request.request_id in table.live or table.has_ended(request.request_id):
            return
        live = self.dispatcher.at_work = arrived(request, event.partition)
        table.add(live)
        live.cancel = table.take_early(request)
        if live.cancel is not None:
            self.dispatcher.cancelled(live, now_ms)
            return
        self.dispatcher.enqueue(live, now_ms)
        self.dispatcher.pump(now_ms)

    def _cancellation_arrived(self, event: CancellationArrived, now_ms: int) -> None:
        cancellation, table = event.cancellation, self.dispatcher.table
        live = self._find(cancellation.request_id)
        if live is None:
            if not table.has_ended(cancellation.request_id):
                table.cancel_early(cancellation, event.partition, now_ms)
            return
        if live.cancel is None and may_cancel(cancellation, live.request):
            live.cancel = cancellation.reason
            self.attempts.cancel(live, now_ms)
            self.dispatcher.pump(now_ms)

    def _resumption_arrived(self, event: ResumptionArrived, now_ms: int) -> None:
        """Only of what lives: ids of events, which resume, come after a placement."""
        resumption = event.resumption
        live = self._find(resumption.request_id)
        if live is not None:
            place = resumption.gateway_id, resumption.gateway_started_ms
            self.dispatcher.table.resumed(live, place)

    def _end_unread(self, now_ms: int) -> None:
        """End what nobody can be told any more, because all gateways that read it are lost.

        Where a worker was told to end it already, that one does.
        """
        table = self.dispatcher.table
        lost = self.gateways.lost(table.by_reader, now_ms)
        for gateway in sorted(lost):
            for live in list(table.by_reader.get(gateway, {}).values()):
                if live.cancel is None and lost.issuperset(live.readers):
                    self.dispatcher.at_work = live
                    live.cancel = CancelReason.GATEWAY_LOST
                    self.dispatcher.cancelled(live, now_ms)

    def _phase_arrived(self, event: PhaseArrived, now_ms: int) -> None:
        live = self._find(event.phase.request_id)
        if live is None or event.phase.attempt != live.attempt or live.state is State.QUEUED:
            return
        self.attempts.reported(live, event.phase, now_ms)
        self.dispatcher.pump(now_ms)

    def _outcome_arrived(self, event: OutcomeArrived, now_ms: int) -> None:
        """The request has ended, unless a later attempt was placed since
        (`schemas/rules/outcomes.py`).

        A worker that was given up may have written its outcome before it heard so. While the
        request waits to be placed again, that outcome is the end: the gateway has taken it for
        one. Once a later attempt was placed it is not, because the gateway may follow that one
        already and then ignores whatever lower attempts say.
        """
        outcome = event.outcome
        live = self._find(outcome.request_id)
        if live is None or outcome.attempt < live.attempt:
            return
        if outcome.kind is OutcomeKind.COMPLETED:
            worker = self.dispatcher.orders.charged(live, *DECODERS)
            if worker is not None:
                observations.answered(self.dispatcher.placer, live, worker, outcome, now_ms)
            self._remember_session(live, outcome, now_ms)
        if outcome.attempt > live.attempt:  # of a router before this one: what it placed is void
            self.dispatcher.orders.void(live, now_ms)
        self.dispatcher.ended(live, now_ms)
        self.dispatcher.pump(now_ms)

    def _remember_session(self, live: Live, outcome: Outcome, now_ms: int) -> None:
        if not outcome.decode_worker or outcome.decode_worker != live.decode[0]:
            return
        session_id = outcome.session_id
        known = self.dispatcher.sessions.get(session_id, now_ms)
        session = Session(
            session_id=session_id,
            decode_worker=outcome.decode_worker,
            worker_epoch=live.decode[1],
            context_tokens=outcome.prompt_tokens + outcome.completion_tokens,
            turns=1 + (0 if known is None else known.turns),
            last_used_ms=now_ms,
            kv=outcome.kv,
        )
        self.dispatcher.sessions.put(session, live.partition)
        self.dispatcher.out.append(SaveSession(session, live.partition))
        self._evict_sessions(now_ms)

    def _evict_sessions(self, now_ms: int) -> None:
        for session_id, partition in self.dispatcher.sessions.evict(now_ms):
            self.dispatcher.out.append(Forget(session_id, partition))

    def _fleet_record_arrived(self, event: FleetRecordArrived, now_ms: int) -> None:
        member_id = event.record.member_id
        self.dispatcher.fleet.apply(event.record, event.offset, now_ms, event.ahead_ms)
        self._place_lost([x for x in self.dispatcher.table.by_life if x[0] == member_id], now_ms)
        self.dispatcher.pump(now_ms)

    def _place_lost(self, lives: Iterable[Life], now_ms: int) -> None:
        """Void the attempts of those lives that are over."""
        dispatcher = self.dispatcher
        for life in sorted(life for life in lives if dispatcher.fleet.is_lost(life, now_ms)):
            for live in list(dispatcher.table.by_life.get(life, {}).values()):
                self.attempts.lost(live, life, now_ms)

    def _kv_events_arrived(self, event: KvEventsArrived, now_ms: int) -> None:
        self.dispatcher.placer.prefixes.apply(event.record)

    def _tick(self, event: Tick, now_ms: int) -> None:
        dispatcher = self.dispatcher
        dispatcher.fleet.prefill_absent_ms(now_ms)
        self._place_lost(dispatcher.table.by_life, now_ms)
        dispatcher.expire_queue(now_ms)
        for live in dispatcher.table.due(now_ms):
            self.attempts.overdue(live, now_ms)
        if now_ms - self._swept_ms >= _SWEEP_MS:
            self._swept_ms = now_ms
            self._end_unread(now_ms)
            dispatcher.table.sweep(now_ms)
            dispatcher.placer.forget(dispatcher.fleet.forget(now_ms))
            self._evict_sessions(now_ms)
        dispatcher.placer.prefixes.sweep()
        dispatcher.pump(now_ms)

    def _partition_taken(self, event: PartitionTaken, now_ms: int) -> None:
        assert event.partition not in self.owned
        self.owned.add(event.partition)
        self._rebuilds[event.partition] = Rebuild(event.partition)

    def _partition_ready(self, event: PartitionReady, now_ms: int) -> None:
        rebuilt = self._rebuilds.pop(event.partition).result()
        table = self.dispatcher.table
        for request_id, deadline_ms in rebuilt.ended:
            until_ms = max(deadline_ms, now_ms) + self.settings.deadline_grace_ms
            table.remember(request_id, until_ms, event.partition)
        for cancellation in rebuilt.early:
            table.cancel_early(cancellation, event.partition, now_ms)
        for session in rebuilt.sessions:
            self.dispatcher.sessions.put(session, event.partition)
        for live, failed in rebuilt.live:
            self.attempts.adopt(live, failed, now_ms)
        self._evict_sessions(now_ms)
        self.dispatcher.pump(now_ms)

    def _partition_lost(self, event: PartitionLost, now_ms: int) -> None:
        self.owned.discard(event.partition)
        self._rebuilds.pop(event.partition, None)
        self.dispatcher.sessions.drop(event.partition)
        for live in self.dispatcher.table.of_partition(event.partition):
            self.dispatcher.admission.remove(live.request_id)
            self.dispatcher.orders.refund(live)
            self.dispatcher.table.drop(live)
        self.dispatcher.table.forget_partition(event.partition)
        self.dispatcher.pump(now_ms)
