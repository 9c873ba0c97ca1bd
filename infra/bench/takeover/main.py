"""Measures how long a router takes to take over partitions after an hour of traffic.

`make bench-takeover`, or `trivium bench takeover`. Writes the records of such an hour to its own
broker, as gateways, routers and workers would have written them, and before them the conversations
of the day's other hours. A router rebuilds its state from them: once when all live requests are a
few seconds old, and once when one is as old as the traffic. Writes build/bench/takeover.json.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from rich.console import Console

from infra.bench.benchmark import Benchmark, BenchmarkResult
from infra.bench.results import Bar, at_most
from infra.bench.search.parts.through_the_log import running_broker
from infra.bench.takeover.hour_of_traffic import RecordSource
from schemas.settings import LogSettings
from schemas.topics import partition_of
from streams.agents.app import marks_group
from streams.agents.partitions import OwnedPartitions
from streams.agents.router import RouterProcess
from streams.config import RouterSettings
from streams.log.clock import wall_ms
from streams.log.connecting import client_options

YOUNG_MAX_S, HOUR_MAX_S = 5.0, 180.0  # bars: live requests are young, or as old as the traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeoverTraffic:
    """Sets the records on the log before the takeover."""

    seconds: int = 3_600
    requests_per_s: int = 100
    live_s: int = 5  # requests of the last 5 s have not ended
    prompt_tokens: int = 300
    turns: int = 4  # of each conversation
    earlier_hours: int = 23  # of which the log has only the conversations


def chunks(traffic: TakeoverTraffic) -> Iterator[range]:
    """Yield the numbers of the requests of each second."""
    for second in range(traffic.seconds):
        yield range(second * traffic.requests_per_s, (second + 1) * traffic.requests_per_s)


async def write_traffic(log: LogSettings, traffic: TakeoverTraffic) -> dict[int, int]:
    """Write all records; return the number of ended requests by partition."""
    source = RecordSource(prompt_tokens=traffic.prompt_tokens, turns=traffic.turns)
    producer = AIOKafkaProducer(**client_options(log), max_request_size=8 << 20, acks=1)
    began_ms = wall_ms() - traffic.seconds * 1_000
    ended_counts: dict[int, int] = dict.fromkeys(range(log.session_partitions), 0)
    last = (traffic.seconds - traffic.live_s) * traffic.requests_per_s
    await producer.start()
    try:
        await write_conversations(producer, log, traffic, source)
        for second, numbers in enumerate(chunks(traffic)):
            at_ms = began_ms + second * 1_000
            batches: dict[tuple[str, int], Any] = {}
            for number in numbers:
                partition = partition_of(source.session_id(number), log.session_partitions)
                ended_counts[partition] += number < last
                for topic, key, value in source.records(number, has_ended=number < last):
                    place = (topic, partition)
                    if place not in batches:
                        batches[place] = producer.create_batch()
                    if batches[place].append(key=key, value=value, timestamp=at_ms) is None:
                        await _send(producer, log, place, batches.pop(place))
                        batches[place] = producer.create_batch()
                        batches[place].append(key=key, value=value, timestamp=at_ms)
            for place, batch in batches.items():
                await _send(producer, log, place, batch)
    finally:
        await producer.stop()
    return ended_counts


async def write_conversations(
    producer: AIOKafkaProducer, log: LogSettings, traffic: TakeoverTraffic, source: RecordSource
) -> None:
    """Write the conversations of earlier hours, each after its last turn."""
    number = traffic.seconds * traffic.requests_per_s  # beyond the numbers of the hour's requests
    began_ms = wall_ms() - traffic.seconds * 1_000
    for minute in range(-60 * traffic.earlier_hours, 0):
        at_ms, batches = began_ms + minute * 60_000, dict[int, Any]()
        for _ in range(60 * traffic.requests_per_s // traffic.turns):
            number += traffic.turns
            partition = partition_of(source.session_id(number), log.session_partitions)
            key, value = source.session(number)
            if partition not in batches:
                batches[partition] = producer.create_batch()
            if batches[partition].append(key=key, value=value, timestamp=at_ms) is None:
                await _send(producer, log, ("sessions", partition), batches.pop(partition))
                batches[partition] = producer.create_batch()
                batches[partition].append(key=key, value=value, timestamp=at_ms)
        for partition, batch in batches.items():
            await _send(producer, log, ("sessions", partition), batch)


async def _send(
    producer: AIOKafkaProducer, log: LogSettings, place: tuple[str, int], batch: Any
) -> None:
    await producer.send_batch(batch, log.topic_prefix + place[0], partition=place[1])


async def mark(log: LogSettings, offsets: dict[int, int]) -> None:
    """Commit these offsets as the marks that the previous router left."""
    consumer = AIOKafkaConsumer(
        **client_options(log), group_id=marks_group(log), enable_auto_commit=False
    )
    await consumer.start()
    try:
        places = {TopicPartition(f"{log.topic_prefix}requests", p): at for p, at in offsets.items()}
        consumer.assign(list(places))
        consumer.pause(*places)
        await consumer.commit(places)
    finally:
        await consumer.stop()


async def take_over(log: LogSettings) -> dict[str, float]:
    """Rebuild all partitions in one router; return times in s, records and live requests."""
    process = RouterProcess(log, RouterSettings(), router_id="router-bench")
    partitions, partition_ids = OwnedPartitions(process), set(range(log.session_partitions))
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    partitions.on_assigned({("requests", p) for p in partition_ids})
    opened = asyncio.gather(*(partitions.gate.passes(p) for p in partition_ids))
    failing = asyncio.ensure_future(process.group.wait_for_failure())
    ends: list[asyncio.Future[Any]] = [opened, failing]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if failing.done():
        failing.result()
    failing.cancel()
    return {
        "seconds": time.monotonic() - began_s,
        "cpu_seconds": time.process_time() - began_cpu_s,
        "records": float(process.group.records_read),
        "live": float(len(process.router.view())),
    }


async def measure(log: LogSettings, traffic: TakeoverTraffic, console: Console) -> dict[str, Any]:
    """Write the traffic, then time a takeover with young marks and one with marks at the start."""
    began_s = time.monotonic()
    ended_counts = await write_traffic(log, traffic)
    console.print(
        f"Wrote {traffic.seconds * traffic.requests_per_s} requests with their records in "
        f"{time.monotonic() - began_s:.0f} s."
    )
    figures = {}
    for name, offsets in (("young", ended_counts), ("hour", dict.fromkeys(ended_counts, 0))):
        await mark(log, offsets)
        row = figures[name] = await take_over(log)
        console.print(
            f"{name}: {row['records']:.0f} records in {row['seconds']:.2f} s, "
            f"{row['live']:.0f} requests live."
        )
    return figures


def bars_of(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars for both takeovers."""
    return [
        at_most("takeover, all that lives is young", figures["young"]["seconds"], YOUNG_MAX_S, "s"),
        at_most("takeover, one lives since the start", figures["hour"]["seconds"], HOUR_MAX_S, "s"),
    ]


def run(traffic: TakeoverTraffic, console: Console) -> BenchmarkResult:
    """Run the benchmark on its own broker."""
    with tempfile.TemporaryDirectory() as folder, running_broker(Path(folder)) as (log, _):
        figures = asyncio.run(measure(log, traffic, console))
    return BenchmarkResult(figures=figures, bars=bars_of(figures))


BENCHMARK = Benchmark(
    name="takeover",
    about=__doc__,
    run=run,
    full=TakeoverTraffic(),
    quick=TakeoverTraffic(seconds=120, earlier_hours=0),
    quick_help="two minutes of traffic, not an hour, and nothing before",
)
