"""Measures how long a router takes to take over partitions after an hour of traffic.

`make bench-takeover`, or `trivium bench takeover`. Writes the records of such an hour to its own
broker, as gateways, routers and workers would have written them, and before them the conversations
of the day's other hours. A router's core makes each kind of record once, and then the ids in its
bytes are replaced; all usage records have the same number. A router rebuilds its state from them:
once when all live requests are a few seconds old, and once when one is as old as the traffic.
Writes build/bench/takeover.json.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from rich.console import Console

from infra.bench.benchmark import Benchmark, BenchmarkResult
from infra.bench.decisions.large_fleet import (
    ROUTER,
    FleetSize,
    FleetTraffic,
    completed_outcome,
    prefill_phase,
)
from infra.bench.results import Bar, at_most
from infra.bench.stacks import running_log
from schemas.codec import Codec
from schemas.records import PhaseKind, Work
from schemas.rules.outcomes import outcome_key
from schemas.rules.tokens import pack_tokens
from schemas.settings import LogSettings
from schemas.topics import partition_of
from streams.agents.app import marks_group
from streams.agents.partitions import OwnedPartitions
from streams.agents.router import RouterProcess
from streams.config import RouterSettings
from streams.core.effects import Decide, Dispatch, RecordUsage, SaveSession
from streams.core.events import (
    Event,
    FleetRecordArrived,
    OutcomeArrived,
    PartitionReady,
    PartitionTaken,
    PhaseArrived,
    RequestArrived,
)
from streams.core.router import Router
from streams.log.clock import wall_ms
from streams.log.connecting import client_options

LATER_MS = 1 << 42  # a deadline that never passes; other times of the templates do not matter
_ID, _SESSION = "req-00000000000000000000", "session-000000000000"
_FLEET = FleetSize(workers=10, sessions=1, blocks=1)
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


class RecordSource:
    """Makes the records of each request by its number; `turns` requests are one conversation."""

    def __init__(self, *, prompt_tokens: int, turns: int) -> None:
        self._turns = turns
        codec = Codec()
        self._templates = [
            (topic, key.encode(), codec.encode(record))
            for topic, key, record in _records(prompt_tokens)
        ]

    def session_id(self, number: int) -> str:
        """Return the session id of this request number."""
        return f"session-{number // self._turns:012d}"

    def session(self, number: int) -> tuple[bytes, bytes]:
        """Return key and value of the session record of this request's conversation."""
        _, key, value = next(template for template in self._templates if template[0] == "sessions")
        session_id = self.session_id(number).encode()
        return _fill(key, b"", session_id), _fill(value, b"", session_id)

    def records(self, number: int, *, has_ended: bool) -> Iterator[tuple[str, bytes, bytes]]:
        """Yield topic, key and value in written order; without an end, the request is live."""
        request_id = f"req-{number:020d}".encode()
        session_id = self.session_id(number).encode()
        for topic, key, value in self._templates:
            if has_ended or topic not in ("outcomes", "usage", "sessions"):
                yield (
                    topic,
                    _fill(key, request_id, session_id),
                    _fill(value, request_id, session_id),
                )


def _fill(template: bytes, request_id: bytes, session_id: bytes) -> bytes:
    return template.replace(_ID.encode(), request_id).replace(_SESSION.encode(), session_id)


def _records(prompt_tokens: int) -> Iterator[tuple[str, str, Any]]:
    """Yield topic, key and record, in the order in which they are written."""
    traffic, router = FleetTraffic(_FLEET, seed=1, start_ms=0), Router(ROUTER, RouterSettings())
    for record in traffic.registrations():
        router.apply(FleetRecordArrived(record, 0), 0)
    for beat in traffic.heartbeats(1, 0):
        router.apply(FleetRecordArrived(beat, 1), 0)
    for event in (PartitionTaken(0), PartitionReady(0)):
        router.apply(event, 0)
    request = replace(
        traffic.request(0, 0),
        request_id=_ID,
        parent_id=_ID,
        session_id=_SESSION,
        prompt_tokens=pack_tokens(range(prompt_tokens)),
        deadline_ms=LATER_MS,
    )
    yield "requests", _SESSION, request
    decision, work = _placed(router, RequestArrived(request, 0))
    yield "decisions", _SESSION, decision
    phase = prefill_phase(work, 30)
    yield "phases", _SESSION, phase
    decision, work = _placed(router, PhaseArrived(phase, 0))
    yield "decisions", _SESSION, decision
    received = replace(phase, kind=PhaseKind.KV_RECEIVED, worker_id=work.worker_id, kv=None)
    yield "phases", _SESSION, received
    outcome = completed_outcome(work, 2_000)
    yield "outcomes", outcome_key(outcome), outcome
    saved, used = router.apply(OutcomeArrived(outcome, 0), 0)
    assert isinstance(saved, SaveSession) and isinstance(used, RecordUsage)
    yield "usage", _ID, replace(used.usage, number=0)
    yield "sessions", _SESSION, saved.session


def _placed(router: Router, event: Event) -> tuple[Any, Work]:
    """Return the decision on this event, and the work for the worker."""
    decided, order = router.apply(event, 0)
    assert isinstance(decided, Decide) and isinstance(order, Dispatch)
    assert isinstance(order.record, Work)
    return decided.decision, order.record


def chunks(traffic: TakeoverTraffic) -> Iterator[range]:
    """Yield the numbers of the requests of each second."""
    for second in range(traffic.seconds):
        yield range(second * traffic.requests_per_s, (second + 1) * traffic.requests_per_s)


class BatchWriter:
    """Writes records of one moment, in one batch for each partition as long as they fit."""

    def __init__(self, producer: AIOKafkaProducer, log: LogSettings) -> None:
        self._producer, self._prefix = producer, log.topic_prefix
        self._batches: dict[tuple[str, int], Any] = {}

    async def add(self, topic: str, partition: int, key: bytes, value: bytes, at_ms: int) -> None:
        """Add a record to the batch of its partition, and send the batch if it is full."""
        place = (topic, partition)
        if (batch := self._batches.get(place)) is None:
            batch = self._batches[place] = self._producer.create_batch()
        if batch.append(key=key, value=value, timestamp=at_ms) is None:
            await self._send(place, batch)
            batch = self._batches[place] = self._producer.create_batch()
            batch.append(key=key, value=value, timestamp=at_ms)

    async def flush(self) -> None:
        """Send all batches to their partitions."""
        for place, batch in self._batches.items():
            await self._send(place, batch)
        self._batches.clear()

    async def _send(self, place: tuple[str, int], batch: Any) -> None:
        await self._producer.send_batch(batch, self._prefix + place[0], partition=place[1])


async def write_traffic(log: LogSettings, traffic: TakeoverTraffic) -> dict[int, int]:
    """Write all records; return the number of ended requests by partition."""
    source = RecordSource(prompt_tokens=traffic.prompt_tokens, turns=traffic.turns)
    producer = AIOKafkaProducer(**client_options(log), max_request_size=8 << 20, acks=1)
    writer, began_ms = BatchWriter(producer, log), wall_ms() - traffic.seconds * 1_000
    ended_counts: dict[int, int] = dict.fromkeys(range(log.session_partitions), 0)
    last = (traffic.seconds - traffic.live_s) * traffic.requests_per_s
    await producer.start()
    try:
        await write_conversations(writer, log, traffic, source)
        for second, numbers in enumerate(chunks(traffic)):
            for number in numbers:
                partition = partition_of(source.session_id(number), log.session_partitions)
                ended_counts[partition] += number < last
                for topic, key, value in source.records(number, has_ended=number < last):
                    await writer.add(topic, partition, key, value, began_ms + second * 1_000)
            await writer.flush()
    finally:
        await producer.stop()
    return ended_counts


async def write_conversations(
    writer: BatchWriter, log: LogSettings, traffic: TakeoverTraffic, source: RecordSource
) -> None:
    """Write the conversations of earlier hours, each after its last turn."""
    number = traffic.seconds * traffic.requests_per_s  # beyond the numbers of the hour's requests
    began_ms = wall_ms() - traffic.seconds * 1_000
    for minute in range(-60 * traffic.earlier_hours, 0):
        for _ in range(60 * traffic.requests_per_s // traffic.turns):
            number += traffic.turns
            partition = partition_of(source.session_id(number), log.session_partitions)
            key, value = source.session(number)
            await writer.add("sessions", partition, key, value, began_ms + minute * 60_000)
        await writer.flush()


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
    with tempfile.TemporaryDirectory() as folder, running_log(Path(folder)) as (log, _):
        figures = asyncio.run(measure(log, traffic, console))
    return BenchmarkResult(figures=figures, bars=bars_of(figures))


BENCHMARK = Benchmark(
    "takeover", __doc__, run, full=TakeoverTraffic(),
    quick=TakeoverTraffic(seconds=120, earlier_hours=0),
    quick_help="two minutes of traffic, not an hour, and nothing before",
)  # fmt: skip
