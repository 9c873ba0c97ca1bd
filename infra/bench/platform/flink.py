"""Offers five times the pools' capacity from Flink for five minutes, and counts what gets lost.

One job of Flink SQL (`infra/platform/flink/overload.sql`) sends rows as prompts and reads the
answers, and calls the OpenAI endpoint with Flink's own model function, both at once and both with
class `batch`. The pools are simulated and small. Their capacity is the rate of answers from the
first answer until the last row was offered, so their start does not count. Then more workers start
and process the rows that wait in Kafka. At the end every row must have one answer, and the job must
not have restarted.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from aiokafka import AIOKafkaConsumer, ConsumerRecord
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from rich.console import Console

from infra.bench.results import Bar, at_least, at_most, ratio
from infra.bench.stacks import MODEL, make_stack, running, urls
from infra.platform.flink.jobs import SqlJob, script
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from schemas.records import Priority

ANSWER_TOKENS = 16
STEP_MS = 100.0
SLOTS = 8
ANSWERED, PREDICTED = "flink.answered", "flink.predicted"
_QUIET_S = 120.0  # the run ends if no row arrives for this long


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """Sets the offered rate, as a factor of the capacity, and its duration."""

    seconds: float = 300.0
    factor: float = 5.0
    helpers: int = 7  # workers that start when all rows were offered

    @property
    def capacity(self) -> float:
        """Answers per second of the one worker: each slot takes all steps of an answer."""
        return SLOTS / ((ANSWER_TOKENS + 1) * STEP_MS / 1_000)

    @property
    def rate(self) -> int:
        """Rows per second that Flink sends to the topics."""
        return round(self.capacity * self.factor)

    @property
    def tickets(self) -> int:
        """Number of rows that Flink sends to the topics."""
        return round(self.rate * self.seconds)

    @property
    def calls(self) -> int:
        """Number of rows for the model function, whose calls slow down their source."""
        return round(self.capacity * self.seconds / 2)


Key = tuple[str, int, int] | str


@dataclass(slots=True)
class RowCounts:
    """Counts of each row and of each error in one topic."""

    rows: Counter[Key] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    times_ms: list[int] = field(default_factory=list)  # in the order of reading

    @property
    def double(self) -> int:
        """Number of records beyond the first of each row."""
        return sum(self.rows.values()) - len(self.rows)

    def missing(self, expected: Sequence[Key]) -> int:
        """Return how many expected rows the topic does not contain."""
        return sum(row not in self.rows for row in expected)


def steady_rate(times_ms: Sequence[int], until_ms: int) -> float:
    """Return records per second from the first until `until_ms`; 0 without any."""
    counted = [time_ms for time_ms in times_ms if time_ms <= until_ms]
    seconds = (until_ms - min(counted, default=until_ms)) / 1_000
    return (len(counted) - 1) / seconds if seconds else 0.0


Look = Callable[[ConsumerRecord, dict[str, Any]], tuple[Key, str]]


def own_row(record: ConsumerRecord, value: dict[str, Any]) -> tuple[Key, str]:
    """Return the id and the error of a row that Flink wrote."""
    return str(value["id"]), value.get("error") or ("" if value.get("answer") else "empty")


def prompt_row(record: ConsumerRecord, value: dict[str, Any]) -> tuple[Key, str]:
    """Return topic, partition and offset of a prompt."""
    return (record.topic, record.partition, record.offset), ""


def answer_row(record: ConsumerRecord, value: dict[str, Any]) -> tuple[Key, str]:
    """Return topic, partition and offset of the answered prompt, and the error code."""
    prompt = (value["prompt_topic"], value["prompt_partition"], value["prompt_offset"])
    return prompt, value.get("error_code") or ""


class RowReader:
    """Reads topics from their beginning; each `read` continues where the last one ended."""

    def __init__(self, bootstrap: str, topics: dict[str, Look]) -> None:
        self.counts = {topic: RowCounts() for topic in topics}
        self._topics = topics
        self._consumer = AIOKafkaConsumer(  # without a group: all partitions of the topics
            *topics,
            bootstrap_servers=bootstrap,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )

    async def __aenter__(self) -> Self:
        await self._consumer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._consumer.stop()

    async def read(self, *, wait_ms: int = 500) -> None:
        """Count the records that have arrived since the last call; waits up to `wait_ms`."""
        for records in (await self._consumer.getmany(timeout_ms=wait_ms)).values():
            for record in records:
                row, error = self._topics[record.topic](record, json.loads(record.value))
                topic_counts = self.counts[record.topic]
                topic_counts.rows[row] += 1
                topic_counts.times_ms.append(record.timestamp)
                if error:
                    topic_counts.errors[error] += 1


async def measure(options: Overload, folder: Path, console: Console) -> dict[str, Any]:
    """Start the stack and Flink, wait for the answers to all rows, and return the figures."""
    plan = StackPlan(prefill=0, decode=0, replica=1, bridges=1)
    sim = {"decode_step_ms": STEP_MS, "running_max": SLOTS}
    stack = make_stack(plan, folder, priority=Priority.BATCH, **sim)
    async with running(stack):
        await _make_topics(stack.bootstrap)
        job = SqlJob(_script(options, stack), folder)
        job.start()
        try:
            async with _reader(stack) as reader:
                run = _Run(options, stack, job, reader, console)
                await run.wait_offered()
                await stack.scale(replica=1 + options.helpers)
                await run.wait_drained()
                return run.figures()
        finally:
            await job.stop()


def bars(figures: Mapping[str, Any]) -> list[Bar]:
    """Return the bars for restarts, lost and double rows, and the offered load."""
    return [
        at_most("Flink: job restarts", figures["job_restarts"], 0),
        at_most("Flink: rows lost", figures["rows_lost"], 0),
        at_most("Flink: rows twice", figures["rows_double"], 0),
        at_least("Flink: offered to capacity", figures["offered_to_capacity"], 4.5, "x"),
    ]


def _script(options: Overload, stack: Stack) -> str:
    return script(
        "tables.sql",
        "overload.sql",
        bootstrap=stack.bootstrap,
        prefix=stack.settings.log.topic_prefix,
        gateway=urls(stack)[0],
        model=MODEL,
        rate=options.rate,
        tickets=options.tickets,
        calls=options.calls,
        max_tokens=ANSWER_TOKENS,
        concurrent=round(SLOTS * options.factor),
        answered=ANSWERED,
        predicted=PREDICTED,
    )


async def _make_topics(bootstrap: str) -> None:
    """Create the topics that only Flink writes to."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name, 1, 1) for name in (ANSWERED, PREDICTED)])
    finally:
        await admin.close()


def _reader(stack: Stack) -> RowReader:
    prefix = stack.settings.log.topic_prefix
    looks = {f"{prefix}prompts": prompt_row, f"{prefix}answers": answer_row}
    return RowReader(stack.bootstrap, {**looks, ANSWERED: own_row, PREDICTED: own_row})


class _Run:
    """Counts rows in the topics while Flink runs."""

    def __init__(
        self, options: Overload, stack: Stack, job: SqlJob, reader: RowReader, console: Console
    ) -> None:
        prefix = stack.settings.log.topic_prefix
        self._options, self._job, self._reader, self._console = options, job, reader, console
        self._prompts = reader.counts[f"{prefix}prompts"]
        self._answers = reader.counts[f"{prefix}answers"]
        self._answered = reader.counts[ANSWERED]
        self._predicted = reader.counts[PREDICTED]
        self._begun_s = time.monotonic()
        self._news_s = time.monotonic()

    async def wait_offered(self) -> None:
        """Wait until all rows for the topics are in Kafka."""
        await self._read_until(lambda: len(self._prompts.rows) >= self._options.tickets)

    async def wait_drained(self) -> None:
        """Wait until Flink has all answers, or nothing new arrives."""
        options, answered, predicted = self._options, self._answered.rows, self._predicted.rows
        await self._read_until(
            lambda: len(answered) >= options.tickets and len(predicted) >= options.calls
        )
        await self._reader.read()  # surplus answers, which count as double

    async def _read_until(self, is_done: Callable[[], bool]) -> None:
        self._news_s, before = time.monotonic(), self._count()
        while not is_done():
            await self._reader.read()
            if (now := self._count()) != before:
                before, self._news_s = now, time.monotonic()
            if self._job.process.exit_code is not None:
                self._console.print(f"Flink ended: {self._job.process.tail()}")
                return
            if time.monotonic() - self._news_s > _QUIET_S:
                return

    def _count(self) -> int:
        return sum(sum(topic_counts.rows.values()) for topic_counts in self._reader.counts.values())

    def figures(self) -> dict[str, Any]:
        """Return the rates and the counts of lost and double rows."""
        options = self._options
        times, called = self._prompts.times_ms, self._predicted.times_ms
        until_ms = max(times, default=0)
        capacity = steady_rate([*self._answers.times_ms, *called], until_ms)
        # A call blocks its source, so the offered rate of calls is the rate of their answers.
        offered = steady_rate(times, until_ms) + steady_rate(called, until_ms)
        rows_lost = self._answered.missing([str(n + 1) for n in range(options.tickets)])
        calls_lost = self._predicted.missing([str(n + 1) for n in range(options.calls)])
        return {
            "rows_to_topics": len(self._prompts.rows),
            "rows_to_model_function": options.calls,
            "offered_s": (until_ms - min(times, default=0)) / 1_000,
            "offered_per_s": offered,
            "capacity_per_s": capacity,
            "offered_to_capacity": ratio(offered, capacity),
            "job_restarts": self._job.restarts(),
            "rows_lost": rows_lost + calls_lost + max(0, options.tickets - len(self._prompts.rows)),
            "rows_double": sum(counts.double for counts in self._reader.counts.values()),
            "answers_missing": self._answers.missing(list(self._prompts.rows)),
            "error_answers": sum(self._answers.errors.values()),
            "errors": dict(self._answers.errors + self._predicted.errors),
            "whole_s": time.monotonic() - self._begun_s,
        }
