"""Reports to routers, on `phases`, how much a reader has of an answer whose attempt became void.

Every reader of an answer may report it: all report the same, because the log says where the attempt
ends (`streams/calls/stream/stream.py`). If no report arrives in time, the router waits a moment,
and the answer restarts. The hub calls this and waits for nothing.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from aiokafka.errors import KafkaError

from schemas.errors import TriviumError
from schemas.records import Continued
from streams.calls.stream.hub import AnswerProgress, Hub
from streams.log.clients import Ack, LogProducer
from streams.log.clock import wall_ms

logger = logging.getLogger(__name__)
PENDING_MAX = 10_000  # the oldest are dropped


class ProgressReporter:
    """Receives the progress of void attempts from a hub; `write` writes it until cancelled."""

    def __init__(
        self, gateway_id: str, hub: Hub, *, producer: Callable[[], LogProducer | None]
    ) -> None:
        hub.on_void = self._report
        self._gateway_id, self._producer = gateway_id, producer
        self._pending: deque[Continued] = deque(maxlen=PENDING_MAX)
        # Keys of written reports, since a mark may be read again: request, attempt, has an end.
        self._reported_keys: dict[tuple[str, int, bool], None] = {}
        self._has_pending = asyncio.Event()

    def _report(self, progress: AnswerProgress) -> None:
        """Queue the report of a void attempt, unless it was queued: a mark may be read more than
        once."""
        record = progress_record(progress, self._gateway_id, wall_ms())
        key = _key(record)
        if key in self._reported_keys:
            return
        self._reported_keys[key] = None
        if len(self._reported_keys) > PENDING_MAX:
            del self._reported_keys[next(iter(self._reported_keys))]
        self._pending.append(record)
        self._has_pending.set()

    async def write(self) -> None:
        """Write queued reports until cancelled."""
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            in_flight: list[tuple[Continued, Ack]] = []
            while self._pending:
                await self._send(self._pending.popleft(), in_flight)
            acks = [ack for _, ack in in_flight]
            outcomes = await asyncio.gather(*acks, return_exceptions=True)
            for (record, _), outcome in zip(in_flight, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    self._report_failed(record, outcome)

    async def _send(self, record: Continued, in_flight: list[tuple[Continued, Ack]]) -> None:
        producer = self._producer()
        if producer is None:
            self._report_failed(record, None)
            return
        partition = producer.session_partition(record.session_id)
        try:
            ack = await producer.send("phases", record, key=record.session_id, partition=partition)
        except (TriviumError, KafkaError) as error:
            self._report_failed(record, error)
        else:
            in_flight.append((record, ack))

    def _report_failed(self, record: Continued, error: BaseException | None) -> None:
        """Log a report that was not written; the next router asks again with another mark."""
        self._reported_keys.pop(_key(record), None)
        logger.warning("phases: %s: what there is was not told: %r", record.request_id, error)


def progress_record(progress: AnswerProgress, gateway_id: str, now_ms: int) -> Continued:
    """Build the record of a reader's progress, from which the next attempt continues, or of its
    end."""
    return Continued(
        request_id=progress.request_id,
        session_id=progress.session_id,
        attempt=progress.attempt,
        tokens=progress.tokens,
        chars=progress.chars,
        written_by=gateway_id,
        at_ms=now_ms,
        end=progress.end,
    )


def _key(record: Continued) -> tuple[str, int, bool]:
    return record.request_id, record.attempt, record.end is not None
