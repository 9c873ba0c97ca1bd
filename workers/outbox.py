"""Sends phases and outcomes durably, off the decode loop, and never loses one silently.

Records wait in a queue, are sent in order without awaiting each acknowledgement, and are sent again
where that fails; a record that cannot be sent ends the life, whose requests are then placed
elsewhere. Sending twice is harmless. Nothing is sent while the worker's lease is in doubt.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from schemas.errors import BrokerUnavailable, RecordTooLarge
from schemas.log.clients import Ack, Headers, LogProducer
from schemas.records import Outcome, Phase, PhaseKind
from schemas.rules.outcomes import outcome_key

RETRY_S = 0.1


@dataclass(slots=True)
class _Entry:
    record: Phase | Outcome
    headers: Headers
    tries: int = 0


class Outbox:
    """Phases and outcomes on their way. `add` never blocks; `run` sends until cancelled."""

    def __init__(
        self,
        producer: LogProducer,
        stands: Callable[[], Awaitable[None]],
        *,
        pending_max: int,
        tries_max: int,
    ) -> None:
        self._producer = producer
        self._stands = stands
        self._pending_max = pending_max
        self._tries_max = tries_max
        self._queue: deque[_Entry] = deque()
        self._pending = 0  # added and not acknowledged
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._flushed = asyncio.Event()
        self._failed: BrokerUnavailable | None = None
        self._update()

    def __len__(self) -> int:
        return self._pending

    def add(self, record: Phase | Outcome, headers: Headers = ()) -> None:
        """Send a record as soon as possible."""
        self._pending += 1
        self._put(_Entry(record, headers))
        self._update()

    def _put(self, entry: _Entry) -> None:
        self._queue.append(entry)
        self._changed.set()

    def _update(self) -> None:
        for event, wanted in (
            (self._room, self._pending < self._pending_max),
            (self._flushed, self._pending == 0),
        ):
            if wanted:
                event.set()
            else:
                event.clear()

    async def room(self) -> None:
        """Wait until fewer than the most records are pending; who makes more asks first."""
        await self._room.wait()

    async def flushed(self) -> None:
        """Wait until everything was acknowledged."""
        await self._flushed.wait()

    async def run(self) -> None:
        """Send, while the lease stands; raises BrokerUnavailable after all tries."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._queue:
                if self._failed is not None:
                    raise self._failed
                await self._stands()
                await self._send(self._queue.popleft())
            if self._failed is not None:
                raise self._failed

    async def _send(self, entry: _Entry) -> None:
        record = entry.record
        topic, key = "phases", record.session_id
        if isinstance(record, Outcome):
            topic, key = "outcomes", outcome_key(record)
        entry.tries += 1
        try:
            ack = await self._producer.send(
                topic,
                record,
                key=key,
                partition=self._producer.session_partition(record.session_id),
                headers=entry.headers,
            )
        except RecordTooLarge as error:
            if record.kv is None:
                raise
            entry.record = without_kv(record, error)
            self._queue.appendleft(entry)
            return
        except BrokerUnavailable as error:
            self._again(entry, error)
            return
        ack.add_done_callback(lambda done: self._acknowledged(entry, done))

    def _acknowledged(self, entry: _Entry, ack: Ack) -> None:
        if ack.cancelled():
            return  # the producer was closed
        error = ack.exception()
        if error is not None:
            self._again(entry, error)
            return
        self._pending -= 1
        self._update()

    def _again(self, entry: _Entry, error: BaseException) -> None:
        if entry.tries < self._tries_max:
            asyncio.get_running_loop().call_later(RETRY_S * entry.tries, self._put, entry)
            return
        record = entry.record
        self._failed = BrokerUnavailable(
            f"{type(record).__name__} of request {record.request_id} not sent after "
            f"{entry.tries} tries: {error}"
        )
        self._changed.set()


def without_kv(record: Phase | Outcome, error: RecordTooLarge) -> Phase | Outcome:
    """What is said where a handle is too large to travel: no KV is kept for the next turn, or the
    attempt failed.
    """
    if isinstance(record, Outcome):
        return replace(record, kv=None)
    return replace(record, kind=PhaseKind.FAILED, kv=None, error=error.to_wire())
