"""Carries effects out in the order in which they were decided, and acknowledges their causes.

A record that caused effects is acknowledged to Faust when the broker has acknowledged all of them,
and never before an earlier record of its topic: Faust would commit past what is still in flight
(ARCHITECTURE.md names the defect). Nothing here waits for one acknowledgement before the next send.
A send that fails is fatal to the process; the next one rebuilds from the log.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.log.clients import Headers, LogProducer
from schemas.log.clock import wall_ms
from schemas.records import StreamEnd, TokenFrame, Work
from streams.core.effects import Decide, Dispatch, Effect, End, Forget, SaveSession

TRACES_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Write:
    """A record of the router's own (journal, sessions); without a record, a tombstone."""

    topic: str
    key: str
    partition: int
    record: Any | None


@dataclass(slots=True, eq=False)
class Receipt:
    """One record that was applied: `pending` effects are not acknowledged yet."""

    acknowledge: Callable[[], object]
    pending: int


class Lane:
    """Receipts of one topic, acknowledged in order."""

    def __init__(self) -> None:
        self._waiting: deque[Receipt] = deque()

    def open(self, acknowledge: Callable[[], object], pending: int) -> Receipt:
        """The next record of the topic."""
        receipt = Receipt(acknowledge, pending)
        self._waiting.append(receipt)
        self.advance()
        return receipt

    def advance(self) -> None:
        """Acknowledge from the front what has nothing pending."""
        while self._waiting and not self._waiting[0].pending:
            self._waiting.popleft().acknowledge()

    def drop(self) -> None:
        """Acknowledge none of what waits: its partitions were taken away."""
        self._waiting.clear()


class Outbox:
    """Effects wait here for the one task that sends them."""

    def __init__(
        self, producer: LogProducer, prefix: str, router_id: str, pending_max: int
    ) -> None:
        self.traces: OrderedDict[str, bytes] = OrderedDict()  # traceparent by request
        self.unsaved: dict[str, SaveSession | Forget] = {}
        self._producer = producer
        self._prefix = prefix
        self._router_id = router_id
        self._pending_max = pending_max
        self._queue: deque[tuple[Effect | Write, Lane | None, Receipt | None]] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._pending = 0
        self._error: BaseException | None = None

    def put(
        self,
        effects: Sequence[Effect | Write],
        lane: Lane | None = None,
        receipt: Receipt | None = None,
    ) -> None:
        """Have effects sent; with a receipt, `pending` must count them."""
        for effect in effects:
            self._queue.append((effect, lane, receipt))
        if effects:
            self._pending += len(effects)
            self._idle.clear()
            self._wake.set()

    async def room(self) -> None:
        """Wait until few enough sends are pending."""
        if self._pending > self._pending_max:
            await self._idle.wait()

    async def drain(self) -> None:
        """Wait until everything put so far is acknowledged."""
        await self._idle.wait()

    def trace(self, request_id: str, headers: Headers) -> None:
        """Remember the caller's trace, to hand it on with the work."""
        for name, value in headers:
            if name == "traceparent":
                self.traces[request_id] = value
        if len(self.traces) > TRACES_MAX:
            self.traces.popitem(last=False)

    async def run(self) -> None:
        """Send until cancelled; raises what a send raised."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._error is not None:
                raise self._error
            while self._queue:
                effect, lane, receipt = self._queue.popleft()
                acks = await self._send(effect)
                self._follow(acks, lane, receipt)

    def _follow(
        self, acks: list[asyncio.Future[Any]], lane: Lane | None, r: Receipt | None
    ) -> None:
        left = len(acks)

        def done(ack: asyncio.Future[Any] | None) -> None:
            nonlocal left
            left -= 1
            if ack is not None and (ack.cancelled() or ack.exception() is not None):
                error = None if ack.cancelled() else ack.exception()
                self._error = error or ConnectionError("a send was cancelled")
                self._wake.set()
                return
            if left <= 0:
                self._acknowledged(lane, r)

        if not acks:
            done(None)
        for ack in acks:
            ack.add_done_callback(done)

    def _acknowledged(self, lane: Lane | None, receipt: Receipt | None) -> None:
        self._pending -= 1
        if not self._pending:
            self._idle.set()
        if receipt is not None and lane is not None:
            receipt.pending -= 1
            lane.advance()

    async def _send(self, effect: Effect | Write) -> list[asyncio.Future[Any]]:
        send = self._producer.send
        match effect:
            case Dispatch(topic, partition, record):
                key, headers = record.request_id, self._trace_of(record)
                return [await send(topic, record, key=key, partition=partition, headers=headers)]
            case Decide(decision, partition):
                key = decision.session_id
                return [await send("decisions", decision, key=key, partition=partition)]
            case End(outcome, partition, gateway):
                key, frame = outcome.request_id, end_frame(effect, self._router_id, wall_ms())
                self.traces.pop(key, None)
                return [
                    await send("outcomes", outcome, key=key, partition=partition),
                    await send("tokens", frame, key=str(gateway), partition=gateway),
                ]
            case SaveSession(session):
                self.unsaved[session.session_id] = effect
                return []
            case Forget(session_id):
                self.unsaved[session_id] = effect
                return []
            case Write(topic, key, partition, None):
                full, raw = self._prefix + topic, key.encode()
                return [await self._producer.send_raw(full, None, key=raw, partition=partition)]
            case Write(topic, key, partition, record):
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
        for session_id, effect in unsaved.items():
            session = effect.session if isinstance(effect, SaveSession) else None
            writes.append(Write("sessions", session_id, effect.partition, session))
        self.put(writes)


def end_frame(end: End, router_id: str, now_ms: int) -> TokenFrame:
    """The last word to the gateway; seq and chars of 0 mean as many as it has."""
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
        ends=(last,),
    )
