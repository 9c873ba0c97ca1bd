"""Tells routers how much there is of an answer whose attempt they gave up, on `phases`.

Every reader of an answer may tell: all say the same, because the log says where the attempt ends
(`streams/gateway/stream/stream.py`). What is not told in time, or not at all, costs its router a
moment, and the answer begins anew. Called by the hub, which waits for nothing.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from aiokafka.errors import KafkaError

from schemas.errors import TriviumError
from schemas.log.clients import Ack, LogProducer
from schemas.log.clock import wall_ms
from schemas.records import Continued
from streams.gateway.stream.hub import AnswerProgress, Hub

logger = logging.getLogger(__name__)
PENDING_MAX = 10_000  # the oldest go first


class ProgressReporter:
    """What a hub is told of void attempts; `write` until cancelled."""

    def __init__(
        self, gateway_id: str, hub: Hub, *, producer: Callable[[], LogProducer | None]
    ) -> None:
        hub.on_void = self._report
        self._gateway_id, self._producer = gateway_id, producer
        self._pending: deque[Continued] = deque(maxlen=PENDING_MAX)
        # Requests, attempts, and whether their end was told: whoever reads again.
        self._reported_keys: dict[tuple[str, int, bool], None] = {}
        self._has_pending = asyncio.Event()

    def _report(self, progress: AnswerProgress) -> None:
        """An attempt was given up; its mark may be read more than once."""
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
        """Write what there is to tell."""
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
        """The next router asks again, by another mark."""
        self._reported_keys.pop(_key(record), None)
        logger.warning("phases: %s: what there is was not told: %r", record.request_id, error)


def progress_record(progress: AnswerProgress, gateway_id: str, now_ms: int) -> Continued:
    """What a reader has, for the next attempt to go on behind, or as the end of all."""
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
