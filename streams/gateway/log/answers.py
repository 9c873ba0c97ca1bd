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
from streams.gateway.stream.hub import Hub, SoFar

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
        # Requests, attempts, and whether their end was told: whoever reads again.
        self._told: dict[tuple[str, int, bool], None] = {}
        self._has_pending = asyncio.Event()

    def _tell(self, so_far: SoFar) -> None:
        """An attempt was given up; its mark may be read more than once."""
        record = answer_so_far(so_far, self._gateway_id, wall_ms())
        key = _key(record)
        if key in self._told:
            return
        self._told[key] = None
        if len(self._told) > PENDING_MAX:
            del self._told[next(iter(self._told))]
        self._pending.append(record)
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
        self._told.pop(_key(record), None)
        logger.warning("phases: %s: what there is was not told: %r", record.request_id, error)


def answer_so_far(so_far: SoFar, gateway_id: str, now_ms: int) -> Continued:
    """What a reader has, for the next attempt to go on behind, or as the end of all."""
    return Continued(
        request_id=so_far.request_id,
        session_id=so_far.session_id,
        attempt=so_far.attempt,
        tokens=so_far.tokens,
        chars=so_far.chars,
        written_by=gateway_id,
        at_ms=now_ms,
        end=so_far.end,
    )


def _key(record: Continued) -> tuple[str, int, bool]:
    return record.request_id, record.attempt, record.end is not None
