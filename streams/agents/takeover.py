"""Reads what the log holds of partitions that a router has taken, before it applies anything new.

Reads from the earlier of the horizon and Faust's committed offset, which is only a hint, up to the
end, and hands every record over in the order that keeps the rebuild small: outcomes first, requests
last. The rebuild itself is `streams/core/recovery.py`'s. Called by `streams/agents/router.py`.

Offsets are asked for by a client that fetches nothing: on a connection with a fetch under way,
every question would wait for that fetch.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from schemas.errors import BrokerUnavailable
from schemas.log.clients import AssignedReader, client_options, started
from schemas.log.clock import wall_ms
from schemas.settings import LogSettings
from streams.agents.app import TOPICS, group_id

ORDER = ("sessions", "outcomes", "decisions", "phases", "cancellations", "requests")
SKEW_MS = 60_000  # how far the clocks of two producers may differ
SILENCE_MAX = 10  # empty reads of a second each before a takeover gives up

Place = tuple[str, int]  # topic, without prefix, and partition
Offsets = dict[Place, int]


async def past_records(
    log: LogSettings, partitions: list[int], *, horizon_ms: int, client_id: str, seen: Offsets
) -> AsyncGenerator[tuple[str, ConsumerRecord], None]:
    """Topic and record of everything that may still matter.

    Sets `seen`, by topic and partition, to the offset up to which everything was read.
    """
    committed = await _committed(log, partitions)
    starts, ends = await _ranges(log, partitions, committed, horizon_ms, client_id)
    for topic in ORDER:
        wanted = {p: starts[topic, p] for p in partitions if starts[topic, p] < ends[topic, p]}
        left = {p: ends[topic, p] for p in wanted}
        async with aclosing(_read(log, topic, wanted, left, client_id)) as records:
            async for record in records:
                place = (topic, record.partition)
                ends[place] = max(ends[place], record.offset + 1)
                yield topic, record
    seen.update((place, end) for place, end in ends.items() if place[0] in TOPICS)


async def _read(
    log: LogSettings, topic: str, starts: dict[int, int], left: dict[int, int], client_id: str
) -> AsyncGenerator[ConsumerRecord, None]:
    """Records from the starts until nothing is left before the ends in `left`."""
    if not starts:
        return
    reader = AssignedReader(log, topic, list(starts), client_id=client_id)
    await reader.start(starts)
    silent = 0
    try:
        while left:
            records = await reader.batch(max_records=1_000, timeout_ms=1_000)
            silent = 0 if records else silent + 1
            if silent >= SILENCE_MAX:
                raise BrokerUnavailable(f"{topic}: expected records up to {left}, found none")
            for record in records:
                if record.offset + 1 >= left.get(record.partition, 1 << 62):
                    del left[record.partition]
                yield record
    finally:
        await reader.stop()


async def _committed(log: LogSettings, partitions: list[int]) -> Offsets:
    """The group's committed offsets, where there are any."""
    admin = AIOKafkaAdminClient(**client_options(log))
    await started(admin.start, admin.close)
    try:
        wanted = [TopicPartition(log.topic_prefix + t, p) for t in TOPICS for p in partitions]
        found = await admin.list_consumer_group_offsets(group_id(log), partitions=wanted)
    finally:
        await admin.close()
    prefix = log.topic_prefix
    places = {(tp.topic.removeprefix(prefix), tp.partition): at for tp, at in found.items()}
    return {place: at.offset for place, at in places.items() if at.offset >= 0}


@asynccontextmanager
async def asking_client(log: LogSettings) -> AsyncIterator[AIOKafkaConsumer]:
    """A consumer that fetches nothing."""
    consumer = AIOKafkaConsumer(**client_options(log))
    await started(consumer.start, consumer.stop)
    try:
        yield consumer
    finally:
        await consumer.stop()


async def _ranges(
    log: LogSettings, partitions: list[int], committed: Offsets, horizon_ms: int, client_id: str
) -> tuple[Offsets, Offsets]:
    """From where to where each topic and partition is to be read."""
    places = {
        (topic, p): TopicPartition(log.topic_prefix + topic, p)
        for topic in ORDER
        for p in partitions
    }
    async with asking_client(log) as consumer:
        firsts = await consumer.beginning_offsets(list(places.values()))
        ends = await consumer.end_offsets(list(places.values()))
        since_ms = wall_ms() - horizon_ms
        for p in partitions:
            tp = places["requests", p]
            at = max(committed.get(("requests", p), 0), firsts[tp])
            if at < ends[tp]:
                since_ms = min(since_ms, await _time_at(log, p, at, ends[tp], client_id))
        since = await consumer.offsets_for_times(
            dict.fromkeys(places.values(), max(0, since_ms - SKEW_MS))
        )
    starts: Offsets = {}
    for place, tp in places.items():
        start = ends[tp] if since[tp] is None else since[tp].offset
        if place[0] == "sessions":
            start = firsts[tp]
        elif place[0] in TOPICS:
            start = min(start, committed.get(place, firsts[tp]))
        starts[place] = max(start, firsts[tp])
    return starts, {place: ends[tp] for place, tp in places.items()}


async def _time_at(log: LogSettings, partition: int, at: int, end: int, client_id: str) -> int:
    """When the first request that is not committed was written."""
    reading = _read(log, "requests", {partition: at}, {partition: end}, client_id)
    async with aclosing(reading) as records:
        async for record in records:
            return int(record.timestamp)
    return wall_ms()
