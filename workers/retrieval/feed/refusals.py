"""Sends unusable records to the dead-letter topic, each once although all replicas read it.

All replicas of a shard read all its documents, again at every start. A record that a replica
refuses waits here until it is on the dead-letter topic. The first live replica writes it there; if
that replica dies, another one is the first.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiokafka import ConsumerRecord
from aiokafka.errors import KafkaError

from schemas.errors import TriviumError
from schemas.fleet import FleetView
from schemas.records import MemberKind, MemberState
from schemas.settings import LogSettings
from schemas.topics import DEAD_LETTER_SUFFIX
from streams.log.clients import AssignedReader, LogProducer, send_dead_letter
from workers.retrieval.settings import ShardPlace

log = logging.getLogger("trivium.retrieval")
WAITING_MAX = 1_000
_LOOK_S = 2.0
_CLOCKS_APART_MS = 600_000  # between the writer of a document and the writer of its dead letter
_Origin = tuple[str, str, str]  # partition, offset and timestamp, from the dead letter's headers


class Refusals:
    """Refused records of one topic: `add` them, `run` until cancelled, and `look` at the end."""

    def __init__(
        self,
        settings: LogSettings,
        producer: LogProducer,
        *,
        is_first: Callable[[], bool],
        client_id: str,
        topic: str = "documents",
    ) -> None:
        self._settings = settings
        self._producer = producer
        self._is_first = is_first
        self._client_id, self._topic = f"{client_id}-refusals", topic
        self._waiting: dict[_Origin, tuple[ConsumerRecord, TriviumError]] = {}
        self._added = asyncio.Event()
        self._looking = asyncio.Lock()

    def add(self, record: ConsumerRecord, error: TriviumError) -> None:
        """Queue a refused record for the dead letters."""
        where = f"{record.topic}[{record.partition}] {record.offset}"
        log.warning("%s: not taken: %s", where, error.message)
        origin = (str(record.partition), str(record.offset), str(record.timestamp))
        self._waiting[origin] = (record, error)
        self._added.set()

    async def keep_bound(self) -> None:
        """Drop the oldest refusals beyond `WAITING_MAX`, after one more try to send them."""
        if len(self._waiting) > WAITING_MAX:
            await self.look()
        while len(self._waiting) > WAITING_MAX:
            del self._waiting[next(iter(self._waiting))]

    def first_waiting(self) -> dict[int, int]:
        """Return, by partition, the first offset that is not on the dead-letter topic yet."""
        first: dict[int, int] = {}
        for record, _ in self._waiting.values():
            first[record.partition] = min(record.offset, first.get(record.partition, record.offset))
        return first

    async def run(self) -> None:
        """Call `look` while records wait, until cancelled."""
        while True:
            await self._added.wait()
            self._added.clear()
            await self.look()
            if self._waiting:
                self._added.set()
                await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Forget records that have dead letters; send the others if this replica is the first."""
        async with self._looking:
            try:
                if self._waiting:
                    await self._look()
            except (TriviumError, KafkaError) as error:
                count = len(self._waiting)
                log.warning("%d refused %s are buried later: %s", count, self._topic, error)

    async def _look(self) -> None:
        for buried in await self._buried():
            self._waiting.pop(_origin(buried), None)
        if self._is_first():
            for origin, (record, error) in list(self._waiting.items()):
                await send_dead_letter(self._producer, record, error)
                self._waiting.pop(origin, None)

    async def _buried(self) -> list[ConsumerRecord]:
        """Return the dead letters that may be those of waiting records."""
        topic = self._topic + DEAD_LETTER_SUFFIX
        reader = AssignedReader(self._settings, topic, [0], client_id=self._client_id)
        async with reader.reading("earliest"):
            oldest_ms = min(record.timestamp for record, _ in self._waiting.values())
            since_ms = max(0, oldest_ms - _CLOCKS_APART_MS)
            await reader.seek(await reader.offsets_at(since_ms))
            return await reader.read_to_end()


def _origin(record: ConsumerRecord) -> Any:
    headers = dict(record.headers)
    names = ("x-dlq-partition", "x-dlq-offset", "x-dlq-timestamp")
    return tuple((headers.get(name) or b"").decode(errors="replace") for name in names)


def is_first(
    view: FleetView, place: ShardPlace, member_id: str, now_ms: int, *, of_ready: bool = False
) -> bool:
    """Return whether no live replica of the shard has a smaller id; `of_ready`: no ready one."""
    for member in view.living(MemberKind.WORKER, now_ms):
        search = member.registration.search
        if of_ready and member.state is not MemberState.READY:
            continue
        if search is not None and (search.shard, search.shards) == (place.shard, place.shards):
            return member.member_id >= member_id
    return True
