"""Carries effects out in the order in which they were decided, and acknowledges their causes.

A record that caused effects is acknowledged to Faust when the broker has acknowledged all of them,
and never before an earlier record of its partition (`streams/log/faust/group.py`). A failed send
is fatal to the process, except for work that is too large: then a phase reports that in place of
the worker, and only the attempt fails.

Order between partitions: decisions go first, orders to workers after them. First attempts do not
wait for acknowledgements in between, because the next router allows for work without its decision.
Later attempts, void orders and marks wait until decisions and outcomes are in the log, and work
with passages until its reader's notice is. Nothing is sent while the router's lease is in doubt.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka.errors import MessageSizeTooLargeError

from schemas.errors import RecordTooLarge
from schemas.records import (
    Phase,
    PhaseKind,
    StreamEnd,
    StreamRetrieved,
    StreamVoid,
    TokenFrame,
    Work,
)
from schemas.rules.outcomes import outcome_key
from schemas.rules.phases import phase_of
from schemas.rules.trace import trace_of
from streams.core.effects import (
    Decide,
    Dispatch,
    DropSession,
    Effect,
    End,
    LendRole,
    NotifyRetrieval,
    RecordUsage,
    RequestProgress,
    RestartAnswer,
    SaveSession,
    SkipRetrieval,
    StartRetrieval,
    WarmCache,
)
from streams.core.requests.live import SessionKey, session_key
from streams.log.clients import Ack, Headers, LogProducer
from streams.log.clock import wall_ms
from streams.log.faust.group import Receipt

TRACES_MAX = 100_000


@dataclass(frozen=True, slots=True)
class OwnRecord:
    """A record that the agents make (journal, sessions, phases); None stands for a tombstone."""

    topic: str
    key: str
    partition: int
    record: Any | None


Entry = tuple[Effect | OwnRecord, Receipt | None]


class Outbox:
    """The queue of effects, and the one task that sends them."""

    def __init__(
        self,
        producer: LogProducer,
        prefix: str,
        router_id: str,
        pending_max: int,
        wait_for_lease: Callable[[], Awaitable[None]],
        ask: Callable[[StartRetrieval], None],
        write_usage: Callable[[RecordUsage, Ack | None], Ack],
    ) -> None:
        """Create an outbox. `ask` begins a search and does not block. `write_usage` writes a usage
        record after the ack of its outcome, if this router has sent the outcome."""
        self.traces: OrderedDict[str, bytes] = OrderedDict()  # traceparent by request
        self.unsaved: dict[SessionKey, SaveSession | DropSession] = {}
        self.ending: Counter[str] = Counter()  # by request, unacknowledged parts of its end
        self._producer = producer
        self._prefix = prefix
        self._router_id = router_id
        self._pending_max = pending_max
        self._wait_for_lease = wait_for_lease
        self._ask = ask
        self._write_usage = write_usage
        self._outcomes: dict[str, Ack] = {}  # by request, for its usage
        self._notice_acks: dict[str, asyncio.Future[Any]] = {}  # by request, until acknowledged
        self._queue: deque[Entry] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._pending, self._discarded = 0, False
        self._error: BaseException | None = None

    def put(
        self,
        effects: Sequence[Effect | OwnRecord],
        receipt: Receipt | None = None,
    ) -> None:
        """Queue effects to send; `receipt`, if any, must count them."""
        if self._discarded:
            return
        for effect in effects:
            self._queue.append((effect, receipt))
            if (request_id := _ended_request_id(effect)) is not None:
                self.ending[request_id] += 1
        if effects:
            self._pending += len(effects)
            self._idle.clear()
            self._wake.set()

    async def wait_for_room(self) -> None:
        """Wait until all sends are acknowledged, if more than `pending_max` are pending."""
        if self._pending > self._pending_max:
            await self._idle.wait()

    async def drain(self) -> None:
        """Wait until all queued effects are acknowledged, or discarded."""
        await self._idle.wait()

    def discard(self) -> None:
        """Drop all queued effects and ignore later ones: this router may not send any more."""
        self._queue.clear()
        self._pending, self._discarded = 0, True
        self._idle.set()

    def remember_trace(self, request_id: str, headers: Headers) -> None:
        """Store the caller's trace, to send it on with the work."""
        for _, value in trace_of(headers):
            self.traces[request_id] = value
        if len(self.traces) > TRACES_MAX:
            self.traces.popitem(last=False)

    async def run(self) -> None:
        """Send until cancelled, while the lease is valid; raise the error of a failed send."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._queue or self._error is not None:
                    entries, self._queue = self._queue, deque()
                    await self._send_all(entries)
                    self._raise_error()
        finally:
            self.discard()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def _send_all(self, entries: Iterable[Entry]) -> None:
        """Send decisions, then orders; see the module's docstring."""
        orders: list[Entry] = []
        acks: list[asyncio.Future[Any]] = []
        for entry in entries:
            if is_order(entry[0]):
                orders.append(entry)
            else:
                acks += await self._send_one(entry)
        if acks and any(waits_for_decisions(order) for order, _ in orders):
            await asyncio.wait(acks)
        for entry in orders:
            await self._wait_for_notice(entry)
            await self._send_one(entry)

    async def _wait_for_notice(self, entry: Entry) -> None:
        """Wait until the reader's notice of a prompt is in the log, before its work is sent."""
        effect = entry[0]
        if self._notice_acks and isinstance(effect, Dispatch):
            ack = self._notice_acks.get(effect.record.request_id)
            if ack is not None:
                await asyncio.wait([ack])

    async def _send_one(self, entry: Entry) -> list[asyncio.Future[Any]]:
        await self._wait_for_lease()
        self._raise_error()
        try:
            acks = await self._send(entry[0])
        except RecordTooLarge as error:
            if self._report_unsent(entry, error):
                return []
            raise
        self._watch(acks, entry)
        return [] if isinstance(entry[0], RecordUsage) else acks  # no order waits for usage

    def _report_unsent(self, entry: Entry, error: BaseException) -> bool:
        """Queue a phase that fails the attempt instead; return False if the effect is not work."""
        effect, receipt = entry
        phase = unsent_phase(effect, error, wall_ms())
        if phase is None:
            return False
        partition = self._producer.session_partition(phase.session_id)
        self._queue.append((OwnRecord("phases", phase.session_id, partition, phase), receipt))
        self._wake.set()
        return True

    def _watch(self, acks: list[asyncio.Future[Any]], entry: Entry) -> None:
        pending_acks = len(acks)

        def on_ack(ack: asyncio.Future[Any] | None) -> None:
            nonlocal pending_acks
            pending_acks -= 1
            if ack is not None and (ack.cancelled() or ack.exception() is not None):
                error = None if ack.cancelled() else ack.exception()
                if isinstance(error, MessageSizeTooLargeError):  # the broker's own limit is lower
                    if self._report_unsent(entry, error):
                        return
                self._error = error or ConnectionError("a send was cancelled")
                self._wake.set()
                return
            if pending_acks <= 0:
                self._settle(*entry)

        if not acks:
            on_ack(None)
        for ack in acks:
            ack.add_done_callback(on_ack)

    def _settle(self, effect: Effect | OwnRecord, receipt: Receipt | None) -> None:
        self._pending -= 1
        if (request_id := _ended_request_id(effect)) is not None:
            self.ending[request_id] -= 1
            if not self.ending[request_id]:
                del self.ending[request_id]
        elif isinstance(effect, NotifyRetrieval):
            notice_ack = self._notice_acks.get(effect.retrieved.request_id)
            if notice_ack is not None and notice_ack.done():  # else a later notice is pending
                del self._notice_acks[effect.retrieved.request_id]
        if not self._pending:
            self._idle.set()
        if receipt is not None:
            receipt.settle()

    async def _send(self, effect: Effect | OwnRecord) -> list[asyncio.Future[Any]]:
        send = self._producer.send
        match effect:
            case Dispatch(topic, partition, record):
                key, headers = record.request_id, self._trace_of(record)
                return [await send(topic, record, key=key, partition=partition, headers=headers)]
            case WarmCache(topic, partition, record):
                return [await send(topic, record, key=record.request_id, partition=partition)]
            case LendRole(topic, partition, record):
                return [await send(topic, record, key=record.worker_id, partition=partition)]
            case Decide(decision, partition):
                key = decision.session_id
                return [await send("decisions", decision, key=key, partition=partition)]
            case End(outcome, partition, gateway):
                frame = end_frame(effect, self._router_id, wall_ms())
                key = outcome_key(outcome)
                ack = await send("outcomes", outcome, key=key, partition=partition)
                self._outcomes[outcome.request_id] = ack
                return [ack, await send("tokens", frame, key=str(gateway), partition=gateway)]
            case RecordUsage(usage):
                self.traces.pop(usage.request_id, None)  # worker or router ended it
                return [self._write_usage(effect, self._outcomes.pop(usage.request_id, None))]
            case StartRetrieval():
                self._ask(effect)
                return []
            case SkipRetrieval(retrieved, partition):
                key = retrieved.session_id
                return [await send("phases", retrieved, key=key, partition=partition)]
            case NotifyRetrieval(retrieved, gateway):
                notice_frame = retrieved_frame(retrieved, self._router_id, wall_ms())
                ack = await send("tokens", notice_frame, key=str(gateway), partition=gateway)
                self._notice_acks[retrieved.request_id] = ack
                return [ack]
            case RequestProgress(void, gateway):
                mark = void_frame(void, self._router_id, wall_ms())
                return [await send("tokens", mark, key=str(gateway), partition=gateway)]
            case RestartAnswer(continued, partition):
                key = continued.session_id
                return [await send("phases", continued, key=key, partition=partition)]
            case SaveSession(session):
                self.unsaved[session_key(session)] = effect
                return []
            case DropSession(tenant, session_id):
                self.unsaved[tenant, session_id] = effect
                return []
            case OwnRecord(topic, key, partition, None):
                full, raw = self._prefix + topic, key.encode()
                return [await self._producer.send_raw(full, None, key=raw, partition=partition)]
            case OwnRecord(topic, key, partition, record):
                return [await send(topic, record, key=key, partition=partition)]

    def _trace_of(self, record: object) -> Headers:
        if self.traces and isinstance(record, Work):
            trace = self.traces.get(record.request_id)
            if trace is not None:
                return [("traceparent", trace)]
        return ()

    def save_sessions(self) -> None:
        """Write the sessions that changed since the last call, each once."""
        unsaved, self.unsaved = self.unsaved, {}
        writes = []
        for (tenant, session_id), effect in unsaved.items():
            # Keys without a tenant keep their old form, so that old records are overwritten.
            key = f"{len(tenant)}:{tenant}{session_id}" if tenant else session_id
            session = effect.session if isinstance(effect, SaveSession) else None
            writes.append(OwnRecord("sessions", key, effect.partition, session))
        self.put(writes)


def _ended_request_id(effect: Effect | OwnRecord) -> str | None:
    """Return the id of the request whose end an effect writes, if any."""
    if isinstance(effect, End):
        return effect.outcome.request_id
    return effect.usage.request_id if isinstance(effect, RecordUsage) else None


def is_order(effect: object) -> bool:
    """Return whether an effect tells workers or readers of a decision."""
    return isinstance(effect, Dispatch | RequestProgress)


def waits_for_decisions(order: object) -> bool:
    """Return whether an order must wait until its decision is in the log."""
    if not isinstance(order, Dispatch):
        return True
    record = order.record
    return record.attempt > 1 if isinstance(record, Work) else record.void


def unsent_phase(effect: Effect | object, error: BaseException, now_ms: int) -> Phase | None:
    """Return a failed phase in place of a worker whose work could not be sent; retries cannot help.

    Return None if the effect is not work: then there is no substitute, and the router must end.
    """
    if not isinstance(effect, Dispatch) or not isinstance(effect.record, Work):
        return None
    work = effect.record
    why = RecordTooLarge(f"{work.request_id}: its work was not sent: {error}").to_wire()
    return phase_of(work, PhaseKind.FAILED, now_ms, now_ms, error=why)


def end_frame(end: End, router_id: str, now_ms: int) -> TokenFrame:
    """Return an answer's end for the gateway; seq and chars of 0 mean what the gateway has."""
    outcome = end.outcome
    last = StreamEnd(
        request_id=outcome.request_id,
        attempt=outcome.attempt,
        seq=0,
        chars=0,
        kind=outcome.kind,
        error=outcome.error,
        prompt_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        mode=outcome.mode,
        prefill_worker=outcome.prefill_worker,
        decode_worker=outcome.decode_worker,
    )
    return _frame(router_id, now_ms, ends=(last,))


def retrieved_frame(retrieved: StreamRetrieved, router_id: str, now_ms: int) -> TokenFrame:
    """Return the notice of a prompt's passages, which precedes its first token."""
    return _frame(router_id, now_ms, retrieved=(retrieved,))


def void_frame(void: StreamVoid, router_id: str, now_ms: int) -> TokenFrame:
    """Return the mark that an attempt of an answer is void."""
    return _frame(router_id, now_ms, voids=(void,))


def _frame(
    router_id: str,
    now_ms: int,
    *,
    ends: Sequence[StreamEnd] = (),
    retrieved: Sequence[StreamRetrieved] = (),
    voids: Sequence[StreamVoid] = (),
) -> TokenFrame:
    """Return a frame that carries no tokens."""
    return TokenFrame(
        worker_id=router_id,
        at_ms=now_ms,
        request_ids=(),
        attempts=(),
        first_seqs=(),
        first_chars=(),
        token_counts=(),
        token_ids=(),
        texts=(),
        ends=ends,
        retrieved=retrieved,
        voids=voids,
    )
