"""Reads the records that lines of a journal refer to, for recordings and for shadows."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable
from schemas.settings import LogSettings
from schemas.topics import TOPICS
from streams.journal.journal import READ_BACK
from streams.log.clients import AssignedReader

Place = tuple[str, int, int]  # topic, partition, offset


class NamedRecords:
    """Reads records by their places, as the lines that name them arrive."""

    def __init__(self, log: LogSettings, codec: Codec, client_id: str) -> None:
        self._log, self._codec, self._client_id = log, codec, client_id
        self._plain = Codec()
        self._readers: dict[str, AssignedReader] = {}

    async def start(self, stack: AsyncExitStack) -> None:
        """Start a reader for each topic; the stack stops them."""
        for topic in READ_BACK:
            partitions = range(self._log.partitions(TOPICS[topic].group))
            reader = AssignedReader(self._log, topic, partitions, client_id=self._client_id)
            self._readers[topic] = await stack.enter_async_context(reader.reading("latest"))
            reader.pause()

    async def read(
        self, places: Iterable[Place], timeout_s: float | None = None
    ) -> dict[Place, bytes]:
        """Return the records that the log still has, in a framing that needs no schema registry.

        Raises BrokerUnavailable after the timeout.
        """
        offsets_by_topic: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for topic, partition, offset in places:
            offsets_by_topic[topic][partition].add(offset)
        try:
            async with asyncio.timeout(timeout_s):
                parts = await asyncio.gather(
                    *(
                        self._read_topic(*topic_offsets)
                        for topic_offsets in offsets_by_topic.items()
                    )
                )
        except TimeoutError:
            raise BrokerUnavailable(
                f"records that routers have applied: not read in {timeout_s:.0f} s"
            ) from None
        return {place: value for part in parts for place, value in part.items()}

    async def _read_topic(self, topic: str, offsets: Mapping[int, set[int]]) -> dict[Place, bytes]:
        reader, values = self._readers[topic], dict[Place, bytes]()
        firsts = await reader.first_offsets()
        ends = {p: max(offsets[p]) + 1 if p in offsets else 0 for p in firsts}
        await reader.seek({p: max(firsts[p], min(positions)) for p, positions in offsets.items()})
        async for records in reader.until(ends):
            for message in records:
                if message.offset in offsets.get(message.partition, ()):
                    record = self._codec.decode(message.value)
                    values[topic, message.partition, message.offset] = self._plain.encode(record)
        reader.pause()
        return values
