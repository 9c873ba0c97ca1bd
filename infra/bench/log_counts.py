"""Counts what a load costs: CPU time of processes, and records and bytes that it writes to the log.

Records and bytes are counted by topic, between two offsets.
"""

import asyncio
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from aiokafka import ConsumerRecord, TopicPartition

from infra.bench.meters import CpuMeter
from schemas.settings import LogSettings
from schemas.topics import TOPICS
from streams.log.admin import expected_topics
from streams.log.clients import AssignedReader
from streams.log.connecting import query_client

SETTLE_S = 1.5  # until the records that follow an answer are on the log
_ANSWER_MS = 60_000  # request timeout, for a broker under load
_INTERNAL = ("__transaction_state", "__consumer_offsets")


async def end_offsets(log: LogSettings) -> dict[TopicPartition, int]:
    """Return the end offset of every partition of Trivium's topics and of the broker's own."""
    log = replace(log, request_timeout_ms=_ANSWER_MS)
    names = [*expected_topics(log), *_INTERNAL]
    async with query_client(log, topics=names) as consumer:
        places = [
            TopicPartition(name, partition)
            for name in names
            for partition in consumer.partitions_for_topic(name) or ()
        ]
        offsets: dict[TopicPartition, int] = await consumer.end_offsets(places)
        return offsets


async def counts(
    log: LogSettings, before: Mapping[TopicPartition, int], after: Mapping[TopicPartition, int]
) -> dict[str, dict[str, int]]:
    """Return records, bytes and transaction marks between two sets of end offsets, by topic.

    Bytes are those of keys, values and headers, before compression. Does not read the broker's own
    topics: each of their offsets counts as a record.
    """
    out: dict[str, dict[str, int]] = {}
    for place, end in after.items():
        if (first := before.get(place, 0)) >= end:
            continue
        topic = place.topic.removeprefix(log.topic_prefix)
        row = out.setdefault(topic, {"records": 0, "bytes": 0, "marks": 0})
        if topic in _INTERNAL:
            row["records"] += end - first
            continue
        reader = AssignedReader(log, topic, [place.partition], client_id="counts")
        async with reader.reading({place.partition: first}):
            async for records in reader.until({place.partition: end}):
                counted = [record for record in records if record.offset < end]
                row["records"] += len(counted)
                row["bytes"] += sum(map(record_bytes, counted))
                row["marks"] -= len(counted)
        row["marks"] += end - first
    return {topic: out[topic] for topic in (*TOPICS, *_INTERNAL) if topic in out}


def record_bytes(record: ConsumerRecord) -> int:
    """Return the bytes of the record's key, value and headers."""
    headers = sum(len(name) + len(value or b"") for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers


@dataclass(frozen=True, slots=True)
class LoadCost:
    """What a load returned, and what it cost."""

    result: Any
    elapsed_s: float
    cpu_s: dict[str, float]  # by process
    topics: dict[str, dict[str, int]]  # as `counts` returns them


async def cost_of(load: Awaitable[Any], log: LogSettings, pids: Mapping[str, int]) -> LoadCost:
    """Wait for the load, and for the records that follow it; return its cost."""
    before, meter, began_s = await end_offsets(log), CpuMeter(pids), time.monotonic()
    result = await load
    await asyncio.sleep(SETTLE_S)
    used_s, elapsed_s = meter.used_s(), time.monotonic() - began_s
    topic_counts = await counts(log, before, await end_offsets(log))
    return LoadCost(result, elapsed_s, used_s, topic_counts)
