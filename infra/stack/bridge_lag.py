"""Measures how far bridges have come, from Kafka alone: it asks no bridge, and none need run.

The bridges' commits show which prompts are answered, the consumer group shows which bridge owns
which partition, and the answers of the last seconds show the rate.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from aiokafka import ConsumerRecord

from schemas.settings import LogSettings
from streams.bridge.answers import HEADERS
from streams.bridge.app import group_id
from streams.bridge.config import BridgeSettings, TopicPair, pairs_of
from streams.bridge.progress import decode
from streams.log.admin import group_owners, partition_counts
from streams.log.clients import AssignedReader
from streams.log.clock import wall_ms
from streams.log.transactions import CommittedOffset, FullPlace, committed_offsets

RATE_MS = 10_000  # the window over which answers are counted
_RATE_RECORDS_MAX = 20_000  # per partition; of more, only the newest are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """One partition of a pair's prompts."""

    pair: str
    topic: str
    partition: int
    position: int  # the first prompt without an answer
    end: int
    lag: int  # prompts without an answer
    oldest_ms: int  # the age of the oldest of them
    answers_per_s: float
    owner: str  # the bridge that has the partition; empty: none


async def bridge_lags(log: LogSettings, bridge: BridgeSettings) -> list[Lag]:
    """Return the lag of every partition of every pair whose topics exist."""
    pairs = pairs_of(bridge, log.topic_prefix)
    topics = {name for pair in pairs for name in (pair.prompts, pair.answers)}
    counts = await partition_counts(log, topics)
    present = [pair for pair in pairs if pair.prompts in counts]
    places = [(pair.prompts, n) for pair in present for n in range(counts[pair.prompts])]
    positions = await committed_offsets(log, group_id(log), places)
    owners = await group_owners(log, group_id(log))
    answers = {pair.answers for pair in present} & counts.keys()
    rates: dict[FullPlace, float] = defaultdict(float)
    for topic_rates in await asyncio.gather(*(_rates(log, name, counts[name]) for name in answers)):
        for place, per_s in topic_rates:
            rates[place] += per_s
    by_pair = await asyncio.gather(
        *(_lags(log, pair, counts[pair.prompts], positions) for pair in present)
    )
    return [
        replace(
            row,
            answers_per_s=round(rates[row.topic, row.partition], 1),
            owner=owners.get((row.topic, row.partition), ""),
        )
        for rows in by_pair
        for row in rows
    ]


async def _lags(
    log: LogSettings,
    pair: TopicPair,
    partitions: int,
    positions: Mapping[FullPlace, CommittedOffset],
) -> list[Lag]:
    """Return the rows of one pair, without owner and rate."""
    reader = _reader(log, pair.prompts, partitions)
    async with reader.reading("nowhere"):
        first, ends = await reader.first_offsets(), await reader.end_offsets()
        rows = []
        for partition, end in ends.items():
            commit = positions.get((pair.prompts, partition), CommittedOffset(first[partition]))
            position = max(first[partition], commit.offset)
            ahead = decode(commit.metadata, commit.offset).answered
            row = Lag(
                pair=pair.title,
                topic=pair.prompts,
                partition=partition,
                position=position,
                end=end,
                lag=max(0, end - position - sum(position < offset < end for offset in ahead)),
                oldest_ms=0,
                answers_per_s=0.0,
                owner="",
            )
            rows.append(row)
        oldest = await _oldest(reader, rows)
    now_ms = wall_ms()
    return [
        replace(row, oldest_ms=max(0, now_ms - oldest[row.partition]))
        if row.partition in oldest
        else replace(row, lag=0)  # only markers of transactions are left
        for row in rows
    ]


async def _oldest(reader: AssignedReader, rows: list[Lag]) -> dict[int, int]:
    """Return when the record at each lagging row's position was written, in ms, by partition."""
    waits = {row.partition for row in rows if row.lag}
    if not waits:
        return {}
    await reader.seek({row.partition: row.position if row.lag else row.end for row in rows})
    timestamps: dict[int, int] = {}
    async for batch in reader.until({row.partition: row.end for row in rows}):
        for record in batch:
            timestamps.setdefault(record.partition, record.timestamp)
        if timestamps.keys() >= waits:
            break
    return timestamps


async def _rates(log: LogSettings, answers: str, partitions: int) -> list[tuple[FullPlace, float]]:
    """Return answers per second over the last seconds, by the partition of their prompts."""
    reader, now_ms = _reader(log, answers, partitions), wall_ms()
    counted: dict[int, Counter[FullPlace]] = defaultdict(Counter)
    since_ms: dict[int, int] = {}
    async with reader.reading("nowhere"):
        begin, ends = await reader.offsets_at(now_ms - RATE_MS), await reader.end_offsets()
        starts = {p: max(at, ends[p] - _RATE_RECORDS_MAX) for p, at in begin.items()}
        await reader.seek(starts)
        async for batch in reader.until(ends):
            for record in batch:
                is_whole = starts[record.partition] == begin[record.partition]
                first_ms = now_ms - RATE_MS if is_whole else record.timestamp
                since_ms.setdefault(record.partition, first_ms)
                counted[record.partition].update(_prompt_of(record))
    return [
        (place, count * 1_000 / max(1, now_ms - since_ms[partition]))
        for partition, places in counted.items()
        for place, count in places.items()
    ]


def _prompt_of(answer: ConsumerRecord) -> list[FullPlace]:
    headers = dict(answer.headers)
    topic, partition = (headers.get(HEADERS + name, b"") for name in ("topic", "partition"))
    return [(topic.decode(errors="replace"), int(partition))] if partition.isdigit() else []


def _reader(log: LogSettings, topic: str, partitions: int) -> AssignedReader:
    bare = replace(log, topic_prefix="")
    return AssignedReader(
        bare, topic, range(partitions), client_id="trivium-lag", committed_only=True
    )
