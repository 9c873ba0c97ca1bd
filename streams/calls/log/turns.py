"""Topic `turns`: the turns that gateways remember, published to all gateways.

Each gateway reads the topic whole, without a consumer group, from as far back as conversations are
remembered. The topic is only an optimization: a turn that is not published, or not yet, gives its
conversation another session id.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.errors import RecordError, TopicError
from schemas.records import TurnBatch
from schemas.settings import LogSettings
from schemas.topics import check_record
from streams.calls.ids import ConversationTurn
from streams.log.clients import AssignedReader, LogProducer
from streams.log.clock import wall_ms
from streams.log.retry import TRANSIENT_ERRORS, retry_forever

logger = logging.getLogger(__name__)
BATCHES_MAX = 100  # per read; other tasks run between reads
UNPUBLISHED_MAX = 1_000  # the oldest are dropped
PACE_S = 0.25  # between two records: each costs the writer and all readers a round trip
_TROUBLE = (*TRANSIENT_ERRORS, TopicError)


class TurnTopic:
    """The topic, as one gateway reads and writes it."""

    def __init__(
        self,
        log: LogSettings,
        codec: Codec,
        *,
        gateway_id: str,
        back_ms: int,
        producer: Callable[[], LogProducer | None],
        bury: Callable[[ConsumerRecord, RecordError], Awaitable[None]],
    ) -> None:
        """Set up the topic. `producer` is called each time; it returns None if the log is away."""
        self.on_turn: Callable[[ConversationTurn], None] = lambda turn: None
        self._log = log
        self._codec = codec
        self._gateway_id = gateway_id
        self._back_ms = back_ms
        self._producer = producer
        self._bury = bury
        self._unpublished: deque[ConversationTurn] = deque(maxlen=UNPUBLISHED_MAX)
        self._has_unpublished = asyncio.Event()

    def publish(self, turn: ConversationTurn) -> None:
        """Queue a turn for the next record."""
        self._unpublished.append(turn)
        self._has_unpublished.set()

    async def publish_pending(self) -> None:
        """Publish queued turns until cancelled."""
        while True:
            await self._has_unpublished.wait()
            self._has_unpublished.clear()
            if (producer := self._producer()) is not None:
                await self._send(producer)
            await asyncio.sleep(PACE_S)

    async def _send(self, producer: LogProducer) -> None:
        turns = list(self._unpublished)
        self._unpublished.clear()
        record = TurnBatch(
            gateway_id=self._gateway_id,
            at_ms=wall_ms(),
            digests=[turn.digest for turn in turns],
            session_ids=[turn.session_id for turn in turns],
        )
        try:
            await (await producer.send("turns", record, key=self._gateway_id, partition=0))
        except _TROUBLE as error:
            logger.warning("turns: not published: %s: %s", type(error).__name__, error)

    async def read(self) -> None:
        """Read the turns of all gateways until cancelled; retry after every failure of the log."""
        await retry_forever(self._read_topic, "turns", logger, errors=_TROUBLE)

    async def _read_topic(self) -> None:
        reader = AssignedReader(self._log, "turns", [0], client_id=f"{self._gateway_id}-turns")
        async with reader.reading("nowhere"):
            await reader.seek(await reader.offsets_at(wall_ms() - self._back_ms))
            while True:
                for record in await reader.batch(max_records=BATCHES_MAX):
                    await self._hand_on(record)
                await asyncio.sleep(0)

    async def _hand_on(self, record: ConsumerRecord) -> None:
        try:
            batch = self._codec.decode(record.value)
            check_record("turns", batch)
            assert isinstance(batch, TurnBatch)
            if len(batch.digests) != len(batch.session_ids):
                raise RecordError("TurnBatch: its columns differ in length")
        except RecordError as error:
            await self._bury(record, error)
            return
        for digest, session_id in zip(batch.digests, batch.session_ids, strict=True):
            self.on_turn(ConversationTurn(digest, session_id, batch.at_ms))
