"""The router's state machine: `Router.apply(event, now_ms) -> effects`.

Says which event leads to what for a request in which state; repeated and stale records lead to
nothing. The placing and ending itself is `streams/core/dispatcher.py`'s. Pure and deterministic:
the same events at the same times give the same effects, which recovery, replay and simulation stand
on. Called by `streams/agents/router.py`.
"""

from collections.abc import Callable
from typing import Any

from schemas.errors import EngineFailed
from schemas.records import (
    DecisionKind,
    Mode,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    Reason,
    Role,
    Session,
)
from streams.config import RouterSettings
from streams.core import writing
from streams.core.dispatcher import Dispatcher
from streams.core.effects import Decide, Effect, Forget, SaveSession
from streams.core.events import (
    CancellationArrived,
    Event,
    FleetRecordArrived,
    OutcomeArrived,
    PartitionLost,
    PartitionReady,
    PartitionTaken,
    PhaseArrived,
    Placed,
    RequestArrived,
    SessionLoaded,
    Tick,
)
from streams.core.recovery import Rebuild, arrived, prefilled
from streams.core.requests import Live, State

_ON_WORKER = (State.PREFILLING, State.DECODING)
_SWEEP_MS = 1_000


class Router:
    """All state of the partitions that this router owns."""

    def __init__(self, router_id: str, settings: RouterSettings) -> None:
        self.router_id = router_id
        self.dispatcher = Dispatcher(router_id, settings)
        self.settings = settings
        self.owned: set[int] = set()
        self._rebuilds: dict[int, Rebuild] = {}
        self._swept_ms = 0
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            RequestArrived: self._request_arrived,
            CancellationArrived: self._cancellation_arrived,
            PhaseArrived: self._phase_arrived,
            OutcomeArrived: self._outcome_arrived,
            FleetRecordArrived: self._fleet_record_arrived,
            PartitionTaken: self._partition_taken,
            PartitionReady: self._partition_ready,
            PartitionLost: self._partition_lost,
            Tick: self._tick,
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
        if isinstance(event, SessionLoaded | Placed):
            return []
        self._handlers[type(event)](event, now_ms)
        effects, self.dispatcher.out = self.dispatcher.out, []
        return effects

    def view(self) -> dict[str, tuple[object, ...]]:
        """Live requests as comparable values, by id."""
        table = self.dispatcher.table
        return {request_id: table.live[request_id].view() for request_id in sorted(table.live)}

    def _request_arrived(self, event: RequestArrived, now_ms: int) -> None:
        request, table = event.request, self.dispatcher.table
        if request.request_id in table.live or table.has_ended(request.request_id):
            return
        live = arrived(request, event.partition)
        table.add(live)
        live.cancel = table.take_early(request.request_id)
        if live.cancel is not None:
            self.dispatcher.cancelled(live, now_ms)
            return
        self.dispatcher.enqueue(live, now_ms)
        self.dispatcher.pump(now_ms)

    def _cancellation_arrived(self, event: CancellationArrived, now_ms: int) -> None:
        request_id, reason = event.cancellation.request_id, event.cancellation.reason
        table = self.dispatcher.table
        live = table.live.get(request_id)
        if live is None:
            if not table.has_ended(request_id):
                table.cancel_early(request_id, reason, event.partition, now_ms)
            return
        if live.cancel is None:
            live.cancel = reason
            self._cancel(live, now_ms)
            self.dispatcher.pump(now_ms)

    def _cancel(self, live: Live, now_ms: int) -> None:
        """End what no worker holds; tell the workers otherwise, and wait for their word."""
        if live.state not in _ON_WORKER:
            self.dispatcher.cancelled(live, now_ms)
            return
        assert live.cancel is not None
        record = writing.decision(
            self.router_id,
            live,
            DecisionKind.CANCEL,
            Reason(live.cancel.value),
            self.settings.policy,
            now_ms,
            queue_length=len(self.dispatcher.admission),
        )
        self.dispatcher.out.append(Decide(record, live.partition))
        self._stop_all(live, now_ms)
        self.dispatcher.table.move(live, State.CANCELLING, live.life)

    def _stop_all(self, live: Live, now_ms: int) -> None:
        if live.life != live.prefill:
            self.dispatcher.stop_decode(live, now_ms)
        if not live.kv_received:
            self.dispatcher.stop_prefill(live, now_ms)

    def _phase_arrived(self, event: PhaseArrived, now_ms: int) -> None:
        phase = event.phase
        live = self.dispatcher.table.live.get(phase.request_id)
        if live is None or phase.attempt != live.attempt or live.state is State.QUEUED:
            return
        if (phase.worker_id, phase.worker_epoch) != live.life or live.state is State.HANDING_OVER:
            return  # of a worker that holds it no longer, or repeated
        if phase.kind is PhaseKind.PREFILL_DONE:
            self._prefill_done(live, phase, now_ms)
        elif phase.kind is PhaseKind.KV_RECEIVED:
            live.kv_received = True
        elif phase.kind in (PhaseKind.REFUSED, PhaseKind.FAILED):
            self._failed(live, phase, now_ms)
        self.dispatcher.pump(now_ms)

    def _prefill_done(self, live: Live, phase: Phase, now_ms: int) -> None:
        if live.charged is not Role.PREFILL:
            return
        prefilled(live, phase)
        if live.cancel is not None:
            self.dispatcher.cancelled(live, now_ms)
            return
        self.dispatcher.refund(live)
        self.dispatcher.table.move(live, State.HANDING_OVER, live.life)

    def _failed(self, live: Live, phase: Phase, now_ms: int) -> None:
        refused = phase.kind is PhaseKind.REFUSED
        if refused and live.life is not None and live.charged is not None:
            worker = self.dispatcher.fleet.worker(live.life[0], live.charged)
            if worker is not None and worker.epoch == live.life[1]:
                worker.paused = True
        missing = f"{live.request_id}: {phase.worker_id} gave no reason for {phase.kind.value}"
        error = phase.error or EngineFailed(missing).to_wire()
        if error.retriable or live.cancel is not None:
            reason = Reason.WORKER_REFUSED if refused else Reason.WORKER_FAILED
            self.dispatcher.again(live, reason, error, now_ms)
        else:
            self.dispatcher.fail(live, Reason.REQUEST_FAILED, error, now_ms)

    def _outcome_arrived(self, event: OutcomeArrived, now_ms: int) -> None:
        outcome = event.outcome
        live = self.dispatcher.table.live.get(outcome.request_id)
        if live is None or outcome.attempt < live.attempt:
            return  # ended before, or of an attempt that a later one voided
        if outcome.kind is OutcomeKind.COMPLETED:
            self._remember_session(live, outcome, now_ms)
        self.dispatcher.leave(live, now_ms)
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
        )
        self.dispatcher.sessions.put(session, live.partition)
        self.dispatcher.out.append(SaveSession(session, live.partition))
        self._evict_sessions(now_ms)

    def _evict_sessions(self, now_ms: int) -> None:
        for session_id, partition in self.dispatcher.sessions.evict(now_ms):
            self.dispatcher.out.append(Forget(session_id, partition))

    def _fleet_record_arrived(self, event: FleetRecordArrived, now_ms: int) -> None:
        self.dispatcher.fleet.apply(event.record, event.offset, now_ms)
        self._place_lost(now_ms)
        self.dispatcher.pump(now_ms)

    def _place_lost(self, now_ms: int) -> None:
        """Void the attempts of all lives that are over."""
        dispatcher = self.dispatcher
        lost = [life for life in dispatcher.table.by_life if dispatcher.fleet.is_lost(life, now_ms)]
        for life in sorted(lost):
            for live in list(dispatcher.table.by_life.get(life, {}).values()):
                handing = live.state is State.HANDING_OVER
                reason = Reason.KV_PRODUCER_GONE if handing else Reason.WORKER_LOST
                dispatcher.again(live, reason, None, now_ms)

    def _tick(self, event: Tick, now_ms: int) -> None:
        dispatcher = self.dispatcher
        dispatcher.fleet.prefill_absent_ms(now_ms)
        self._place_lost(now_ms)
        dispatcher.expire_queue(now_ms)
        for live in dispatcher.table.due(now_ms):
            self._overdue(live, now_ms)
        if now_ms - self._swept_ms >= _SWEEP_MS:
            self._swept_ms = now_ms
            dispatcher.table.sweep(now_ms)
            dispatcher.fleet.forget(now_ms)
            self._evict_sessions(now_ms)
        dispatcher.pump(now_ms)

    def _overdue(self, live: Live, now_ms: int) -> None:
        """Workers end what they hold at the deadline; should one not, the router does, later."""
        over_ms = live.request.deadline_ms + self.settings.deadline_grace_ms
        if live.state in (*_ON_WORKER, State.CANCELLING) and now_ms < over_ms:
            self.dispatcher.table.watch(live, over_ms)
            return
        if live.state in _ON_WORKER:
            self._stop_all(live, now_ms)
        if live.cancel is not None:
            self.dispatcher.cancelled(live, now_ms)
        else:
            self.dispatcher.expire(live, now_ms)

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
        for request_id, reason in rebuilt.early:
            table.cancel_early(request_id, reason, event.partition, now_ms)
        for session in rebuilt.sessions:
            self.dispatcher.sessions.put(session, event.partition)
        for live, failed in rebuilt.live:
            self._adopt(live, failed, now_ms)
        self._evict_sessions(now_ms)
        self.dispatcher.pump(now_ms)

    def _adopt(self, live: Live, failed: Phase | None, now_ms: int) -> None:
        """Go on with a rebuilt request: where it is if its worker lives, else from the start."""
        dispatcher = self.dispatcher
        state, life = live.state, live.life
        live.state, live.life = State.QUEUED, None
        dispatcher.table.add(live)
        if life is None:
            if live.cancel is not None:
                dispatcher.cancelled(live, now_ms)
            else:
                dispatcher.enqueue(live, now_ms)
            return
        dispatcher.table.move(live, state, life)
        self._charge_adopted(live)
        if dispatcher.fleet.is_lost(life, now_ms):
            handing = state is State.HANDING_OVER
            reason = Reason.KV_PRODUCER_GONE if handing else Reason.WORKER_LOST
            dispatcher.again(live, reason, None, now_ms)
        elif failed is not None:
            self._failed(live, failed, now_ms)
        elif live.cancel is not None:
            self._cancel(live, now_ms)

    def _charge_adopted(self, live: Live) -> None:
        if live.life is None or live.state is State.HANDING_OVER:
            return
        prefilling = live.state is State.PREFILLING
        with_kv = not prefilling and live.mode is Mode.REMOTE
        for role in (Role.PREFILL,) if prefilling else (Role.DECODE, Role.REPLICA):
            worker = self.dispatcher.fleet.worker(live.life[0], role)
            if worker is not None and worker.epoch == live.life[1]:
                self.dispatcher.charge(live, worker, 0 if with_kv else live.prompt_tokens)
                return

    def _partition_lost(self, event: PartitionLost, now_ms: int) -> None:
        self.owned.discard(event.partition)
        self._rebuilds.pop(event.partition, None)
        self.dispatcher.sessions.drop(event.partition)
        for live in self.dispatcher.table.of_partition(event.partition):
            self.dispatcher.admission.remove(live.request_id)
            self.dispatcher.refund(live)
            self.dispatcher.table.drop(live)
        self.dispatcher.table.forget_partition(event.partition)
        self.dispatcher.pump(now_ms)
