"""Topic `turns`: what one gateway has remembered of a conversation , told to all.

Each gateway reads the topic whole, without a group, from as far back as conversations are
remembered. It is a help, and in nobody's way: a turn that was not told yet, or could not be, costs
its conversation another session id.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.errors import RecordError, TopicError
from schemas.log.clients import AssignedReader, LogProducer
from schemas.log.clock import wall_ms
from schemas.log.patience import TROUBLE, Pauses
from schemas.records import TurnBatch
from schemas.settings import LogSettings
from schemas.topics import check_record
from streams.gateway.request.conversation import Turn

logger = logging.getLogger(__name__)
BATCHES_MAX = 100  # taken at once; between them calls get their turn
UNTOLD_MAX = 1_000  # the oldest go first
PACE_S = 0.25  # between two records: each costs a round to the broker, here and at all readers
_TROUBLE = (*TROUBLE, TopicError)


class Turns:
    """One gateway's side of the topic."""

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
        """`producer` is asked each time: there is none while the log is away."""
        self.heard: Callable[[Turn], None] = lambda turn: None
        self._log = log
        self._codec = codec
        self._gateway_id = gateway_id
        self._back_ms = back_ms
        self._producer = producer
        self._bury = bury
        self._untold: deque[Turn] = deque(maxlen=UNTOLD_MAX)
        self._news = asyncio.Event()

    def tell(self, turn: Turn) -> None:
        """Have it sent, with what else there is by then."""
        self._untold.append(turn)
        self._news.set()

    async def tell_on(self) -> None:
        """Send what there is to tell, over every trouble of the log, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            if (producer := self._producer()) is not None:
                await self._send(producer)
            await asyncio.sleep(PACE_S)

    async def _send(self, producer: LogProducer) -> None:
        turns = list(self._untold)
        self._untold.clear()
        record = TurnBatch(
            gateway_id=self._gateway_id,
            at_ms=wall_ms(),
            digests=[turn.digest for turn in turns],
            session_ids=[turn.session_id for turn in turns],
        )
        try:
            await (await producer.send("turns", record, key=self._gateway_id, partition=0))
        except _TROUBLE as error:
            logger.warning("turns: not told: %s: %s", type(error).__name__, error)

    async def hear(self) -> None:
        """Hear what gateways tell, over every trouble of the log, until cancelled."""
        loop, pauses = asyncio.get_running_loop(), Pauses()
        while True:
            began_s = loop.time()
            try:
                await self._follow()
            except _TROUBLE as error:
                logger.warning("turns: %s: %s", type(error).__name__, error)
            await asyncio.sleep(pauses.after(loop.time() - began_s))

    async def _follow(self) -> None:
        reader = AssignedReader(self._log, "turns", [0], client_id=f"{self._gateway_id}-turns")
        await reader.start("nowhere")
        try:
            await reader.seek(await reader.offsets_at(wall_ms() - self._back_ms))
            while True:
                for record in await reader.batch(max_records=BATCHES_MAX):
                    await self._take(record)
                await asyncio.sleep(0)
        finally:
            await reader.stop()

    async def _take(self, record: ConsumerRecord) -> None:
        try:
            found = self._codec.decode(record.value)
            check_record("turns", found)
            assert isinstance(found, TurnBatch)
            if len(found.digests) != len(found.session_ids):
                raise RecordError("TurnBatch: its columns differ in length")
        except RecordError as error:
            await self._bury(record, error)
            return
        for digest, session_id in zip(found.digests, found.session_ids, strict=True):
            self.heard(Turn(digest, session_id, found.at_ms))
