"""Offers five times the pools' capacity from Flink for five minutes, and counts what gets lost.

One job of Flink SQL (`infra/platform/flink/overload.sql`) sends rows as prompts and reads the
answers, and calls the OpenAI endpoint with Flink's own model function, both at once and both with
class `batch`. The pools are simulated and small. Their capacity is the rate of answers from the
first answer until the last row was offered, so their start does not count. Then more workers start
and process the rows that wait in Kafka. At the end every row must have one answer, and the job must
not have restarted.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from rich.console import Console

from infra.bench.faults.target_stack import MODEL, make_stack, urls
from infra.bench.platform.flink_rows import (
    RowReader,
    answer_row,
    own_row,
    prompt_row,
    steady_rate,
)
from infra.bench.results import Bar, at_least, at_most
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


QUICK = Overload(seconds=8.0)


async def measure(options: Overload, folder: Path, console: Console) -> dict[str, Any]:
    """Start the stack and Flink, wait for the answers to all rows, and return the figures."""
    plan = StackPlan(prefill=0, decode=0, replica=1, bridges=1)
    sim = {"decode_step_ms": STEP_MS, "running_max": SLOTS}
    stack = make_stack(plan, folder, priority=Priority.BATCH, **sim)
    job: SqlJob | None = None
    try:
        await stack.start()
        await _make_topics(stack.bootstrap)
        job = SqlJob(_script(options, stack), folder)
        job.start()
        async with _reader(stack) as reader:
            run = _Run(options, stack, job, reader, console)
            await run.wait_offered()
            await stack.scale(replica=1 + options.helpers)
            await run.wait_drained()
            return run.figures()
    finally:
        if job is not None:
            await job.stop()
        await stack.stop(grace_s=10)


def bars(figures: Mapping[str, Any]) -> list[Bar]:
    """Return the bars for restarts, lost and double rows, and the offered load."""
    return [
        at_most("Flink: job restarts", figures["job_restarts"], 0, ""),
        at_most("Flink: rows lost", figures["rows_lost"], 0, ""),
        at_most("Flink: rows twice", figures["rows_double"], 0, ""),
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
    return RowReader(
        stack.bootstrap,
        {
            f"{prefix}prompts": prompt_row,
            f"{prefix}answers": answer_row,
            ANSWERED: own_row,
            PREDICTED: own_row,
        },
    )


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
        await self._read_until(
            lambda: (
                len(self._answered.rows) >= self._options.tickets
                and len(self._predicted.rows) >= self._options.calls
            )
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
            "offered_to_capacity": offered / capacity if capacity else None,
            "job_restarts": self._job.restarts(),
            "rows_lost": rows_lost + calls_lost + max(0, options.tickets - len(self._prompts.rows)),
            "rows_double": sum(
                topic_counts.double for topic_counts in self._reader.counts.values()
            ),
            "answers_missing": self._answers.missing(list(self._prompts.rows)),
            "error_answers": sum(self._answers.errors.values()),
            "errors": dict(self._answers.errors + self._predicted.errors),
            "whole_s": time.monotonic() - self._begun_s,
        }
