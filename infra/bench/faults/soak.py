"""Measures the memory of gateway and router over a hundred thousand short streams.

`make soak`, or `trivium bench soak --quick`. Each stream begins a new conversation, which leaves
the most state that a request can leave. The warm-up fills the tables of conversations, whose sizes
settings bound. After it the memory of both processes must not grow. Writes build/bench/soak.json.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rich.console import Console

from infra.bench.benchmark import Benchmark, BenchmarkResult, counting, option
from infra.bench.meters import growth, resident_mib
from infra.bench.results import BENCH_DIR, at_most, table
from infra.bench.serving.sse_client import SseConnection, StreamedAnswer, chat_body, chat_call
from infra.bench.stacks import HOST, MODEL, make_stack, running
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from streams.calls.config import GatewaySettings

PLAN = StackPlan(prefill=0, decode=0, replica=1)
WATCHED = ("gateway-0", "router-0")
TOKENS, STEP_MS = 4, 1.0
GROWTH_MAX = 1.05  # last samples over first ones
_SHARE = 0.1  # of the samples that count as first, and as last
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """Sets the number of requests, streams and conversations."""

    requests: int = option(100_000, "measured")
    warm_up: int = option(110_000, "before; more conversations than any table holds")
    streams: int = option(64, "at once")
    table: int = option(0, "conversations that are remembered; 0: as deployed")


@dataclass(slots=True)
class MemoryWatch:
    """Samples the memory of each process in MiB, with the number of answers at that time."""

    answers: list[int] = field(default_factory=list)
    mib: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in WATCHED})

    async def run(self, stack: Stack, answered: Callable[[], int]) -> None:
        """Sample every `_LOOK_S` seconds until cancelled."""
        while True:
            self.answers.append(answered())
            for name, samples in self.mib.items():
                samples.append(resident_mib(stack.processes[name].pid))
            await asyncio.sleep(_LOOK_S)

    def since(self, answers: int) -> dict[str, list[float]]:
        """Return the samples in MiB from `answers` answers on, by process."""
        first = next((n for n, count in enumerate(self.answers) if count >= answers), 0)
        return {name: samples[first:] for name, samples in self.mib.items()}


class ShortStreams:
    """Sends streams one after the other on each of several connections."""

    def __init__(self, port: int, on_progress: Callable[[int], None]) -> None:
        self._port, self._on_progress = port, on_progress
        self._sent_requests = self.answered = 0
        self.errors: Counter[str] = Counter()
        self._last, self._over = 0, asyncio.Event()
        self._connecting: set[asyncio.Task[None]] = set()

    async def send(self, count: int, at_once: int) -> None:
        """Send `count` more streams; returns when the last has ended."""
        self._last = self._sent_requests + count
        self._over.clear()
        await asyncio.gather(*(self._begin() for _ in range(at_once)))
        await self._over.wait()

    async def _begin(self) -> None:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: SseConnection(self._on_end, {}, TOKENS), HOST, self._port
        )
        self._next(connection)

    def _next(self, connection: SseConnection) -> None:
        if self._sent_requests >= self._last:
            connection.close()
            if self.answered >= self._last:
                self._over.set()
            return
        self._sent_requests += 1
        body = chat_body(MODEL, f"Question {self._sent_requests}", TOKENS)
        answer = StreamedAnswer(due_s=0.0, prompt=self._sent_requests)
        connection.send(chat_call(HOST, self._port, body), answer)

    def _on_end(self, connection: SseConnection, answer: StreamedAnswer) -> None:
        self.answered += 1
        self._on_progress(self.answered)
        if answer.error:
            self.errors[answer.error] += 1
        if connection.usable:
            self._next(connection)
        elif self._sent_requests < self._last:
            task = asyncio.create_task(self._begin())
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
        elif self.answered >= self._last:
            self._over.set()


async def run(options: SoakOptions, console: Console) -> BenchmarkResult:
    """Warm up, send short streams, and report how memory grew."""
    watch = MemoryWatch()
    async with running(_stack(options)) as stack:
        streams = await _ask(stack, watch, options)
    measured = watch.since(options.warm_up)
    rows = {
        name: {"first_mib": mib[0], "last_mib": mib[-1], "growth": growth(mib, _SHARE)}
        for name, mib in measured.items()
    }
    every = max(1, len(watch.answers) // 50)
    return BenchmarkResult(
        figures={
            "growth": {name: row["growth"] for name, row in rows.items()},
            "answers": watch.answers[::every],
            "mib": {name: samples[::every] for name, samples in watch.mib.items()},
            "errors": dict(streams.errors),
        },
        bars=[
            *(at_most(f"growth of {name}", row["growth"], GROWTH_MAX)
              for name, row in rows.items()),
            at_most("streams that failed", streams.errors.total(), 0),
        ],
        tables=[table("Memory after the warm-up", rows)],
        load={"tokens": TOKENS, "step_ms": STEP_MS},
    )  # fmt: skip


def _stack(options: SoakOptions) -> Stack:
    stack = make_stack(PLAN, BENCH_DIR.absolute() / "soak", decode_step_ms=STEP_MS)
    settings, limit = stack.settings, options.table
    gateway = replace(settings.gateway, deadline_ms=GatewaySettings().deadline_ms)
    router = settings.router
    if limit:
        gateway = replace(gateway, sessions_max=limit)
        router = replace(router, sessions_max=limit, ended_max=limit)
    stack.settings = replace(settings, gateway=gateway, router=router)
    return stack


async def _ask(stack: Stack, watch: MemoryWatch, options: SoakOptions) -> ShortStreams:
    progress = counting("streams", options.warm_up + options.requests)
    port = stack.settings.gateway.port
    streams = ShortStreams(port, lambda answers: progress(completed=answers))
    watching = asyncio.create_task(watch.run(stack, lambda: streams.answered))
    try:
        for count in (options.warm_up, options.requests):
            await streams.send(count, options.streams)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return streams


BENCHMARK = Benchmark(
    "soak", __doc__, run, full=SoakOptions(),
    quick=SoakOptions(requests=4_000, warm_up=3_000, table=1_000),
    quick_help="4 000 streams after 3 000, with tables of 1 000 conversations",
)  # fmt: skip
