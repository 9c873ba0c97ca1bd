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
from streams.gateway.stream.hub import CallStream, Hub

logger = logging.getLogger(__name__)
PENDING_MAX = 10_000  # the oldest go first


class AnswersSoFar:
    """What a hub is told of void attempts; `write` until cancelled."""

    def __init__(
        self, gateway_id: str, hub: Hub, *, producer: Callable[[], LogProducer | None]
    ) -> None:
        hub.on_void = self._tell
        self._gateway_id, self._producer = gateway_id, producer
        self._pending: deque[Continued] = deque(maxlen=PENDING_MAX)
        self._told: dict[tuple[str, int], None] = {}  # requests and attempts: whoever reads again
        self._has_pending = asyncio.Event()

    def _tell(self, stream: CallStream, attempt: int) -> None:
        """An attempt was given up; its mark may be read more than once."""
        key = stream.request_id, attempt
        if key in self._told:
            return
        self._told[key] = None
        if len(self._told) > PENDING_MAX:
            del self._told[next(iter(self._told))]
        self._pending.append(answer_so_far(stream, attempt, self._gateway_id, wall_ms()))
        self._has_pending.set()

    async def write(self) -> None:
        """Write what there is to tell."""
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            sent: list[tuple[Continued, Ack]] = []
            while self._pending:
                await self._send(self._pending.popleft(), sent)
            acks = [ack for _, ack in sent]
            outcomes = await asyncio.gather(*acks, return_exceptions=True)
            for (record, _), outcome in zip(sent, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    self._not_told(record, outcome)

    async def _send(self, record: Continued, sent: list[tuple[Continued, Ack]]) -> None:
        producer = self._producer()
        if producer is None:
            self._not_told(record, None)
            return
        partition = producer.session_partition(record.session_id)
        try:
            ack = await producer.send("phases", record, key=record.session_id, partition=partition)
        except (TriviumError, KafkaError) as error:
            self._not_told(record, error)
        else:
            sent.append((record, ack))

    def _not_told(self, record: Continued, error: BaseException | None) -> None:
        """The next router asks again, by another mark."""
        self._told.pop((record.request_id, record.attempt), None)
        logger.warning("phases: %s: what there is was not told: %r", record.request_id, error)


def answer_so_far(stream: CallStream, attempt: int, gateway_id: str, now_ms: int) -> Continued:
    """What a stream has, for the next attempt to go on behind."""
    tokens, chars = stream.said()
    return Continued(
        request_id=stream.request_id,
        session_id=stream.call.key.session_id,
        attempt=attempt,
        tokens=tokens,
        chars=chars,
        written_by=gateway_id,
        at_ms=now_ms,
    )
