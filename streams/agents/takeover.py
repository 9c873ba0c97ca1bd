"""Reads the log's records of partitions that a router has taken, before it applies new ones.

Requests are read from their mark (`keep_marks`), other topics from the time of the
first of them, or from Faust's committed offset if that is earlier; sessions are read for as long as
they are stored. The order of topics keeps the rebuild small: usage before outcomes, and requests
last. `streams/core/requests/recovery.py` does the rebuild. Called by
`streams/agents/partitions.py`.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiokafka import ConsumerRecord, TopicPartition

from schemas.settings import LogSettings
from streams.agents.app import TOPICS, group_id, marks_group
from streams.log.clients import AssignedReader
from streams.log.clock import wall_ms
from streams.log.connecting import query_client
from streams.log.faust.group import Place
from streams.log.slices import in_slices
from streams.log.transactions import committed_offsets

ORDER = ("sessions", "usage", "outcomes", "decisions", "phases", "cancellations", "requests")
SKEW_MS = 60_000  # how far the clocks of two producers may differ

Offsets = dict[Place, int]


async def past_records(
    log: LogSettings,
    partitions: list[int],
    *,
    session_ttl_ms: int,
    client_id: str,
    next_offsets: Offsets,
) -> AsyncGenerator[tuple[str, ConsumerRecord], None]:
    """Yield topic and record of everything that may still matter.

    Sets `next_offsets` to the offsets up to which each topic was read.
    """
    starts, ends = await _ranges(log, partitions, session_ttl_ms, client_id)
    for topic in ORDER:
        firsts = {p: starts[topic, p] for p in partitions if starts[topic, p] < ends[topic, p]}
        until = {p: ends[topic, p] for p in firsts}
        async with aclosing(_read(log, topic, firsts, until, client_id)) as records:
            async for record in records:
                place = (topic, record.partition)
                ends[place] = max(ends[place], record.offset + 1)
                yield topic, record
    next_offsets.update((place, end) for place, end in ends.items() if place[0] in TOPICS)


async def _read(
    log: LogSettings, topic: str, starts: dict[int, int], ends: dict[int, int], client_id: str
) -> AsyncGenerator[ConsumerRecord, None]:
    """Yield the records from `starts` to `ends`, and perhaps a few more."""
    if not starts:
        return
    in_transactions = topic == "usage"
    reader = AssignedReader(
        log, topic, list(starts), client_id=client_id, committed_only=in_transactions
    )
    async with reader.reading(starts):
        async for records in reader.until(ends):
            async for record in in_slices(records):
                yield record


async def _committed(log: LogSettings, group: str, partitions: list[int]) -> Offsets:
    """Return a group's committed offsets, as far as there are any."""
    prefix = log.topic_prefix
    positions = await committed_offsets(
        log, group, [(prefix + t, p) for t in TOPICS for p in partitions]
    )
    return {(topic.removeprefix(prefix), p): at.offset for (topic, p), at in positions.items()}


async def _ranges(
    log: LogSettings, partitions: list[int], session_ttl_ms: int, client_id: str
) -> tuple[Offsets, Offsets]:
    """Return the first and the end offsets of the records to read, by topic and partition."""
    read, marks = await asyncio.gather(
        _committed(log, group_id(log), partitions), _committed(log, marks_group(log), partitions)
    )
    tps = {
        (topic, p): TopicPartition(log.topic_prefix + topic, p)
        for topic in ORDER
        for p in partitions
    }
    async with query_client(log, topics={tp.topic for tp in tps.values()}) as consumer:
        firsts = await consumer.beginning_offsets(list(tps.values()))
        ends = await consumer.end_offsets(list(tps.values()))
        starts: Offsets = {}
        since_ms: dict[TopicPartition, int] = {}
        for p in partitions:
            tp = tps["requests", p]
            mark = marks.get(("requests", p), firsts[tp])
            starts["requests", p] = at = mark if firsts[tp] <= mark <= ends[tp] else firsts[tp]
            first_ms = await _time_at(log, p, at, ends[tp], client_id)
            since_ms |= {tps[topic, p]: first_ms for topic in ORDER if topic != "requests"}
            since_ms[tps["sessions", p]] = wall_ms() - session_ttl_ms
        since = await consumer.offsets_for_times(
            {tp: max(0, at_ms - SKEW_MS) for tp, at_ms in since_ms.items()}
        )
    for place, tp in tps.items():
        if tp in since:
            first = since[tp]
            start = ends[tp] if first is None else first.offset
            starts[place] = max(firsts[tp], min(start, read.get(place, start)))
    return starts, {place: ends[tp] for place, tp in tps.items()}


async def _time_at(log: LogSettings, partition: int, at: int, end: int, client_id: str) -> int:
    """Return when the request at an offset was written, in ms; now if there is none yet."""
    if at >= end:
        return wall_ms()
    reading = _read(log, "requests", {partition: at}, {partition: end}, client_id)
    async with aclosing(reading) as records:
        async for record in records:
            return int(record.timestamp)
    return wall_ms()
