"""The router's state machine: `Router.apply(event, now_ms) -> effects`.

Routes each event to its handler (`streams/core/handlers`); all handlers share one set of tables.
Repeated and stale records have no effect. Pure and deterministic: the same events at the same
times give the same effects, which recovery, replay and simulation rely on. Called by
`streams/agents/router.py`.
"""

from collections.abc import Callable, Iterable
from typing import Any

from schemas.records import (
    Backlog,
    CancelReason,
    DecisionKind,
    OutcomeKind,
    Reason,
)
from streams.config import RouterSettings
from streams.core.effects import Decide, Effect
from streams.core.events import (
    CancellationArrived,
    ContinuedArrived,
    DecisionLoaded,
    Event,
    FleetRecordArrived,
    KvEventsArrived,
    OutcomeArrived,
    PartitionLost,
    PartitionReady,
    PartitionTaken,
    PhaseArrived,
    RequestArrived,
    ResumptionArrived,
    RetrievedArrived,
    SessionLoaded,
    Tick,
    UsageLoaded,
)
from streams.core.fleet.readers import ReaderWatch
from streams.core.fleet.role_lending import RoleLending
from streams.core.fleet.workers import DECODERS, Life
from streams.core.handlers import observations
from streams.core.handlers.attempts import Attempts
from streams.core.handlers.dispatch import Dispatcher
from streams.core.handlers.endings import DEADLINE_GRACE_MS, Endings
from streams.core.handlers.orders import Orders, decision
from streams.core.handlers.retrievals import Retrievals
from streams.core.placement.placer import Placer
from streams.core.placement.ppd_table import PpdTable
from streams.core.requests.live import UNPLACED, new_live_request, note_work
from streams.core.requests.probe_results import with_probe
from streams.core.requests.recovery import Rebuild
from streams.core.states import State
from streams.core.tables import RouterTables

_SWEEP_MS = 1_000
_END_REBUILDS = PartitionReady, PartitionLost
_STATE = (
    *("router_id", "settings", "owned", "tables", "placer"),
    *("_reader_watch", "_lending", "_rebuilds", "_swept_ms"),
)


class Router:
    """The state of all partitions that this router owns."""

    def __init__(
        self,
        router_id: str,
        settings: RouterSettings,
        ppd_table: PpdTable | None = None,
        placer: Placer | None = None,
    ) -> None:
        """Create a router without partitions. Policy `table` looks up `ppd_table`; comparisons
        pass a `placer` to replace the one that the settings describe."""
        self.router_id = router_id
        self.settings = settings
        self.owned: set[int] = set()
        self.tables = RouterTables(router_id, settings)
        self.placer = placer or Placer(settings, ppd_table)
        self._reader_watch = ReaderWatch(self.tables.fleet, settings.gateway_grace_ms)
        self._lending = RoleLending(self.tables.fleet, settings.lends_after_ms)
        self._rebuilds: dict[int, Rebuild] = {}
        self._swept_ms = 0
        self._connect()

    def _connect(self) -> None:
        """Create the handlers, which work on the state and have none of their own."""
        tables = self.tables
        self._orders = Orders(
            self.router_id, self.settings.policy, tables.fleet, tables.queue_length, tables.effects
        )
        self._endings = Endings(tables, self._orders)
        self._dispatcher = Dispatcher(tables, self._orders, self._endings, self.placer)
        self._retrievals = Retrievals(tables, self._dispatcher.warm)
        self._attempts = Attempts(
            tables, self._orders, self._endings, self._retrievals, self.placer.estimates_of
        )
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            RequestArrived: self._request_arrived,
            CancellationArrived: self._cancellation_arrived,
            ResumptionArrived: self._resumption_arrived,
            PhaseArrived: self._phase_arrived,
            RetrievedArrived: self._retrieved_arrived,
            ContinuedArrived: self._continued_arrived,
            OutcomeArrived: self._outcome_arrived,
            FleetRecordArrived: self._fleet_record_arrived,
            KvEventsArrived: self._kv_events_arrived,
            PartitionTaken: self._partition_taken,
            PartitionReady: self._partition_ready,
            PartitionLost: self._partition_lost,
            Tick: self._tick,
            SessionLoaded: self._known_already,
            DecisionLoaded: self._known_already,
            UsageLoaded: self._known_already,
        }

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the handlers, for snapshots."""
        return {name: self.__dict__[name] for name in _STATE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()

    def apply(self, event: Event, now_ms: int) -> list[Effect]:
        """Apply one event and return its effects, in the order in which to carry them out."""
        partition = getattr(event, "partition", None)
        if partition in self._rebuilds and not isinstance(event, _END_REBUILDS):
            self._rebuilds[partition].add(event)  # type: ignore[arg-type]  # has a partition
            return []
        if partition is not None and partition not in self.owned:
            if not isinstance(event, PartitionTaken):
                return []
        self._handlers[type(event)](event, now_ms)
        return self.tables.take_effects()

    def blame(self, now_ms: int) -> list[Effect]:
        """Return the effects that count a failed try of the request over which `apply` raised.

        Discard this router afterwards. The next one reads the decision, and ends the request
        after `APPLY_TRIES_MAX` failed tries, so that no record stops routers for ever.
        """
        live = self.tables.failed_over
        if live is None:
            return []
        failed_try = decision(
            self.router_id,
            live,
            DecisionKind.FAIL,
            Reason.ROUTER_RESTARTED,
            self.settings.policy,
            now_ms,
            queue_length=self.tables.queue_length(live.request.model),
        )
        return [Decide(failed_try, live.partition)]

    @property
    def rebuilt(self) -> set[int]:
        """Return the owned partitions whose rebuild is complete."""
        return self.owned - self._rebuilds.keys()

    def is_live(self, request_id: str) -> bool:
        """Return whether the request has arrived and has not ended."""
        return request_id in self.tables.requests.by_id

    @property
    def is_idle(self) -> bool:
        """Return whether a tick has nothing to do but the sweep once a second."""
        return not self.tables.requests.by_id and self.placer.prefixes.is_swept

    def backlogs(self, now_ms: int) -> tuple[Backlog, ...]:
        """Return the queue's figures and the demand on workers of each model; change nothing.
        Before any model is known, return one without a model's name."""
        models = sorted({*self.tables.queues, *self.tables.fleet.models})
        return tuple(self._backlog(model, now_ms) for model in models) or (Backlog(),)

    def _backlog(self, model: str, now_ms: int) -> Backlog:
        queue, by_id = self.tables.queues.of(model), self.tables.requests.by_id
        waiting, demand = queue.admission, queue.demand
        queued = [by_id[request_id] for request_id in (*waiting, *queue.unserved)]
        since_ms = min((live.queued_ms for live in queued), default=now_ms)
        step_ms, sharing_ms = self.placer.estimates_of(model).decode.coefficients[:2]
        return Backlog(
            model=model,
            waiting=len(queued),
            oldest_ms=max(0, now_ms - since_ms),
            slack_ms=waiting.slack_ms(now_ms),
            handing_over=len(queue.handovers),
            retrieving=queue.retrieving,
            requests_per_s=demand.queued.per_s(now_ms),
            prompt_tokens=demand.queued.mean("prompt_tokens"),
            answer_tokens=demand.answered.mean("answer_tokens"),
            prefill_ms=demand.placed.mean("prefill_ms"),
            append_ms=demand.placed.mean("append_ms"),
            step_ms=step_ms,
            sharing_ms=sharing_ms,
        )

    def view(self) -> dict[str, tuple[object, ...]]:
        """Return comparable values of the live requests, by id."""
        by_id = self.tables.requests.by_id
        return {request_id: by_id[request_id].view() for request_id in sorted(by_id)}

    # Records of a partition

    def _known_already(
        self, event: SessionLoaded | DecisionLoaded | UsageLoaded, now_ms: int
    ) -> None:
        """Ignore a record that only rebuilds need: this router wrote it from its own state."""

    def _request_arrived(self, event: RequestArrived, now_ms: int) -> None:
        request, tables = event.request, self.tables
        if self.is_live(request.request_id) or request.request_id in tables.ended_ids:
            return
        live = new_live_request(request, event.partition)
        with tables.about(live):
            tables.requests.add(live)
            live.cancel = tables.early_cancellations.take(request)
            if live.cancel is not None:
                self._endings.end_cancelled(live, now_ms)
                return
            if request.retrieval is not None:
                self._retrievals.begin(live, now_ms)
                return
            tables.enqueue(live, now_ms)
            self._dispatcher.dispatch_waiting(now_ms)

    def _cancellation_arrived(self, event: CancellationArrived, now_ms: int) -> None:
        cancellation, tables = event.cancellation, self.tables
        live = tables.requests.by_id.get(cancellation.request_id)
        if live is None:
            if cancellation.request_id not in tables.ended_ids:
                tables.early_cancellations.add(cancellation, event.partition, now_ms)
            return
        if live.cancel is None and live.heeds(cancellation):
            with tables.about(live):
                live.cancel = cancellation.reason
                self._attempts.cancel(live, now_ms)
                self._dispatcher.dispatch_waiting(now_ms)

    def _resumption_arrived(self, event: ResumptionArrived, now_ms: int) -> None:
        """Add a reader to a live request.

        A resumption never precedes its request: clients resume from ids of events, which exist
        only after a placement.
        """
        resumption, requests = event.resumption, self.tables.requests
        live = requests.by_id.get(resumption.request_id)
        if live is not None:
            requests.resume(live, (resumption.gateway_id, resumption.gateway_started_ms))

    def _phase_arrived(self, event: PhaseArrived, now_ms: int) -> None:
        live = self.tables.requests.by_id.get(event.phase.request_id)
        if live is None:
            return
        note_work(live, event.phase)
        if event.phase.attempt != live.attempt.number or live.state in UNPLACED:
            return
        with self.tables.about(live):
            self._attempts.handle_phase(live, event.phase, now_ms)
            self._dispatcher.dispatch_waiting(now_ms)

    def _retrieved_arrived(self, event: RetrievedArrived, now_ms: int) -> None:
        """Apply the first record of a prompt's search; later ones find another state. Keep what
        searches during the answer found."""
        retrieved = event.retrieved
        live = self.tables.requests.by_id.get(retrieved.request_id)
        if live is not None and retrieved.probe:
            with self.tables.about(live):
                live.passages.probed = with_probe(live.passages.probed, live.request, retrieved)
            return
        if live is None or live.state is not State.RETRIEVING:
            return
        with self.tables.about(live):
            self._retrievals.apply_retrieved(live, retrieved, now_ms)
            self._dispatcher.dispatch_waiting(now_ms)

    def _continued_arrived(self, event: ContinuedArrived, now_ms: int) -> None:
        """Apply the first record of an attempt; later ones find the request in another state. A
        record with an end, which a reader has, counts at any time if the attempt is void.
        """
        continued = event.continued
        live = self.tables.requests.by_id.get(continued.request_id)
        if live is not None and continued.end is not None:
            if live.has_given_up(continued.attempt):
                with self.tables.about(live):
                    self._endings.end_as_read(live, continued.end, now_ms)
                    self._dispatcher.dispatch_waiting(now_ms)
            return
        if live is None or live.state is not State.CONTINUING:
            return
        if continued.attempt != live.attempt.number:
            return
        with self.tables.about(live):
            self._endings.apply_continued(live, continued)
            self.tables.enqueue(live, now_ms)
            self._dispatcher.dispatch_waiting(now_ms)

    def _outcome_arrived(self, event: OutcomeArrived, now_ms: int) -> None:
        """End the request, unless a later attempt has been placed (`schemas/rules/outcomes.py`).

        A worker may have written its outcome before it read that its attempt is void. While the
        request waits for its next placement, that outcome is the end, because the gateway has
        taken it for one. After the next placement it is not, because the gateway may already
        follow the later attempt and then ignores records of lower attempts.
        """
        outcome = event.outcome
        live = self.tables.requests.by_id.get(outcome.request_id)
        if live is None or outcome.attempt < live.attempt.number:
            return
        with self.tables.about(live):
            if outcome.kind is OutcomeKind.COMPLETED:
                worker = self._orders.charged_worker(live, *DECODERS)
                if worker is not None:
                    estimates = self.placer.estimates_of(live.request.model)
                    observations.observe_answer(estimates, live, worker, outcome, now_ms)
                self._endings.remember_session(live, outcome, now_ms)
            # Placed by the last router: this attempt is void.
            if outcome.attempt > live.attempt.number:
                self._orders.void(live, now_ms)
            self._endings.end_by_worker(live, outcome, now_ms)
            self._dispatcher.dispatch_waiting(now_ms)

    # The fleet, and time

    def _fleet_record_arrived(self, event: FleetRecordArrived, now_ms: int) -> None:
        member_id = event.record.member_id
        self.tables.fleet.apply(event.record, event.offset, now_ms, event.ahead_ms)
        lives = self.tables.requests.by_worker
        self._give_up_lost([life for life in lives if life[0] == member_id], now_ms)
        self._dispatcher.dispatch_waiting(now_ms)

    def _give_up_lost(self, lives: Iterable[Life], now_ms: int) -> None:
        """Void the attempts on those worker incarnations that are lost."""
        tables = self.tables
        for life in sorted(life for life in lives if tables.fleet.is_lost(life, now_ms)):
            for live in list(tables.requests.by_worker.get(life, {}).values()):
                with tables.about(live):
                    self._attempts.handle_worker_loss(live, life, now_ms)

    def _kv_events_arrived(self, event: KvEventsArrived, now_ms: int) -> None:
        self.placer.prefixes.apply(event.record)

    def _tick(self, event: Tick, now_ms: int) -> None:
        tables = self.tables
        for pools in tables.fleet.models.values():
            pools.prefill_absent_ms(now_ms)
        self._give_up_lost(tables.requests.by_worker, now_ms)
        self._dispatcher.end_unserved(now_ms)
        for live in tables.requests.due(now_ms):
            with tables.about(live):
                self._attempts.handle_timeout(live, now_ms)
        if now_ms - self._swept_ms >= _SWEEP_MS:
            self._swept_ms = now_ms
            self._sweep(now_ms)
        self.placer.prefixes.sweep()
        self._dispatcher.dispatch_waiting(now_ms)

    def _sweep(self, now_ms: int) -> None:
        """Do the checks that are due once a second."""
        self._end_unread(now_ms)
        self.tables.sweep(now_ms)
        self.placer.forget_models({*self.tables.queues, *self.tables.fleet.models})
        for worker_id in self.tables.fleet.forget(now_ms):
            self.placer.prefixes.forget(worker_id)
        self.tables.effects += self._lending.check(now_ms)
        self._endings.evict_sessions(now_ms)

    def _end_unread(self, now_ms: int) -> None:
        """End the requests whose readers are all lost gateways.

        A worker that already has the order to end such a request ends it.
        """
        requests = self.tables.requests
        lost_gateways = self._reader_watch.lost_gateways(requests.readers, now_ms)
        for gateway in sorted(lost_gateways):
            for live in list(requests.readers.get(gateway, {}).values()):
                if live.cancel is None and lost_gateways.issuperset(live.readers.gateways):
                    with self.tables.about(live):
                        live.cancel = CancelReason.GATEWAY_LOST
                        self._endings.end_cancelled(live, now_ms)

    # Which partitions it owns

    def _partition_taken(self, event: PartitionTaken, now_ms: int) -> None:
        assert event.partition not in self.owned
        self.owned.add(event.partition)
        self._rebuilds[event.partition] = Rebuild(
            event.partition, continues=self.settings.continues
        )

    def _partition_ready(self, event: PartitionReady, now_ms: int) -> None:
        rebuilt, tables = self._rebuilds.pop(event.partition).result(), self.tables
        for request_id, deadline_ms in rebuilt.ended_ids:
            until_ms = max(deadline_ms, now_ms) + DEADLINE_GRACE_MS
            tables.ended_ids.add(request_id, until_ms, event.partition)
        for live, outcome in rebuilt.untold:
            self._orders.void_again(live, now_ms, except_worker=outcome.written_by)
            self._endings.tell_usage(live, outcome)
        for cancellation in rebuilt.early:
            tables.early_cancellations.add(cancellation, event.partition, now_ms)
        for session in rebuilt.sessions:
            tables.sessions.put(session, event.partition)
        for live, failed in rebuilt.live:
            with tables.about(live):
                self._attempts.adopt(live, failed, now_ms)
        self._endings.evict_sessions(now_ms)
        self._dispatcher.dispatch_waiting(now_ms)

    def _partition_lost(self, event: PartitionLost, now_ms: int) -> None:
        self.owned.discard(event.partition)
        self._rebuilds.pop(event.partition, None)
        for live in self.tables.requests.of_partition(event.partition):
            self.tables.queues.of(live.request.model).admission.remove(live.request_id)
            self._orders.refund(live)
            self.tables.requests.drop(live)
        self.tables.forget_partition(event.partition)
        self._dispatcher.dispatch_waiting(now_ms)
