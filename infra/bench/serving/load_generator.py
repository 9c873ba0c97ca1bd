"""The load generator: a separate process that sends chats and checks every answer.

`python -m infra.bench.serving.load_generator` reads one JSON object per line (`OfferedLoad`) and
writes one for each (`CellFigures`). Closed loop: each of a fixed number of streams sends its next
request when its last one has ended. Open loop: Poisson arrivals from a seed, independent of the
server; times count from when a request was due. `infra/bench/serving/main.py` starts it; it is the
same for every server under test.
"""

import asyncio
import json
import random
import resource
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import uvloop

from infra.bench.results import percentiles
from infra.bench.serving.sse_client import SseConnection, StreamedAnswer, chat_call

_CYCLE_S = 0.35  # about the duration of an answer; closed loops spread their starts over it
_IN_FLIGHT_MAX = 2_048  # of an open loop; further arrivals count as errors


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """The load of one cell: requests, address and duration."""

    host: str
    port: int
    bodies: Sequence[str]  # of the requests, as JSON; sent in turn
    expected: Sequence[str] = ()  # the answer to each body; empty if unknown
    tokens: int = 64  # of each answer
    streams: int = 0  # closed loop
    rate_per_s: float = 0.0  # open loop
    requests_max: int = 0  # 0: no limit
    settle_s: float = 1.0  # before the window
    window_s: float = 4.0  # in which figures are taken
    drain_s: float = 30.0  # timeout of requests in flight after the window
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class CellFigures:
    """Figures of one cell. Rates and times cover the window, errors and requests all of it."""

    requests: int = 0  # answered in full
    errors: dict[str, int] = field(default_factory=dict)
    requests_per_s: float = 0.0  # tokens read in the window over tokens per answer
    ttft_ms: dict[str, float | None] = field(default_factory=dict)
    gap_ms: dict[str, float | None] = field(default_factory=dict)  # between tokens
    answer_ms: dict[str, float | None] = field(default_factory=dict)
    tokens_per_read: float = 0.0
    client_cpu_share: float = 0.0  # of one core
    texts: list[str] = field(default_factory=list)  # by body, if `expected` was empty


def _summary(values: Sequence[float]) -> dict[str, float | None]:
    exact = percentiles(values, (50, 90, 99))
    return {name: None if value is None else round(value, 3) for name, value in exact.items()}


class LoadRun:
    """One run of an `OfferedLoad`."""

    def __init__(self, load: OfferedLoad) -> None:
        self._load = load
        self._loop = asyncio.get_running_loop()
        self._requests = [chat_call(load.host, load.port, body) for body in load.bodies]
        self._expected = {i: text.encode() for i, text in enumerate(load.expected)}
        self._started_s = time.perf_counter()
        self._window_s = (
            self._started_s + load.settle_s,
            self._started_s + load.settle_s + load.window_s,
        )
        self._answers: list[StreamedAnswer] = []
        self._idle: deque[SseConnection] = deque()
        self._connections: set[SseConnection] = set()
        self._sent_requests = 0
        self._under_way = 0
        self._refused = 0
        self._over = asyncio.Event()

    async def run(self) -> CellFigures:
        """Send the load, wait for the last answer, and return the figures."""
        cpu_s = _cpu_s()
        if self._load.streams:
            await self._closed_loop()
        else:
            await self._open_loop()
        elapsed_s = time.perf_counter() - self._started_s
        for connection in list(self._connections):
            connection.close()
        return self._figures((_cpu_s() - cpu_s) / elapsed_s)

    async def _closed_loop(self) -> None:
        streams = self._load.streams
        sending = [
            asyncio.create_task(self._begin_stream(number / streams * _CYCLE_S))
            for number in range(streams)
        ]
        await asyncio.gather(*sending)
        await self._drain()

    async def _begin_stream(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        answer = self._next(time.perf_counter())
        if connection := await self._connect(answer):
            self._send(connection, answer)

    async def _open_loop(self) -> None:
        rng = random.Random(self._load.seed)
        due_s = time.perf_counter()
        tasks: set[asyncio.Task[None]] = set()
        while not self._is_over():
            due_s += rng.expovariate(self._load.rate_per_s)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            if self._under_way >= _IN_FLIGHT_MAX:
                self._refused += 1
                continue
            answer = self._next(due_s)
            if self._idle:
                self._send(self._idle.popleft(), answer)
                continue
            task = asyncio.create_task(self._send_when_connected(answer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        await self._drain()

    async def _send_when_connected(self, answer: StreamedAnswer) -> None:
        if connection := await self._connect(answer):
            self._send(connection, answer)

    async def _connect(self, answer: StreamedAnswer) -> SseConnection | None:
        try:
            _, connection = await self._loop.create_connection(
                lambda: SseConnection(self._on_end, self._expected, self._load.tokens),
                self._load.host,
                self._load.port,
            )
        except OSError:
            answer.error = "not connected"
            self._count(answer)
            return None
        self._connections.add(connection)
        return connection

    def _next(self, due_s: float) -> StreamedAnswer:
        number = self._sent_requests % len(self._requests)
        self._sent_requests += 1
        self._under_way += 1
        return StreamedAnswer(due_s=due_s, prompt=number)

    def _is_over(self) -> bool:
        limit = self._load.requests_max
        return time.perf_counter() >= self._window_s[1] or bool(
            limit and self._sent_requests >= limit
        )

    def _send(self, connection: SseConnection, answer: StreamedAnswer) -> None:
        connection.send(self._requests[answer.prompt], answer)

    def _on_end(self, connection: SseConnection, answer: StreamedAnswer) -> None:
        if not connection.usable:
            self._connections.discard(connection)
        elif not self._load.streams:
            self._idle.append(connection)
        elif not self._is_over():
            self._send(connection, self._next(time.perf_counter()))
        self._count(answer)

    def _count(self, answer: StreamedAnswer) -> None:
        self._under_way -= 1
        self._answers.append(answer)
        if not self._under_way:
            self._over.set()

    async def _drain(self) -> None:
        end_s = self._window_s[1] + self._load.drain_s
        while self._under_way:
            self._over.clear()
            try:
                async with asyncio.timeout(end_s - time.perf_counter()):
                    await self._over.wait()
            except TimeoutError:
                return

    def _figures(self, client_cpu_share: float) -> CellFigures:
        begin_s, end_s = self._window_s
        errors = Counter(answer.error for answer in self._answers if answer.error)
        if self._under_way:
            errors["unfinished"] += self._under_way
        if self._refused:
            errors["not sent"] += self._refused
        good = [answer for answer in self._answers if not answer.error]
        reads = [read for answer in good for read in answer.reads if begin_s <= read[0] < end_s]
        tokens = sum(count for _, count in reads)
        counted = [answer for answer in good if begin_s <= answer.due_s < end_s] or good
        return CellFigures(
            requests=len(good),
            errors=dict(errors),
            requests_per_s=round(tokens / self._load.tokens / self._load.window_s, 2),
            ttft_ms=_summary([1e3 * (a.first_token_s - a.due_s) for a in counted]),
            answer_ms=_summary([1e3 * (a.ended_s - a.due_s) for a in counted]),
            gap_ms=_summary([gap for answer in counted for gap in _gaps_ms(answer)]),
            tokens_per_read=round(tokens / len(reads), 2) if reads else 0.0,
            client_cpu_share=round(client_cpu_share, 3),
            texts=self._texts(good),
        )

    def _texts(self, good: Sequence[StreamedAnswer]) -> list[str]:
        if self._expected:
            return []
        texts = {answer.prompt: answer.text.decode() for answer in good}
        return [texts.get(number, "") for number in range(len(self._requests))]


def _gaps_ms(answer: StreamedAnswer) -> list[float]:
    """Return the ms from each token to the next; 0 between tokens of the same read."""
    gaps: list[float] = []
    before_s = answer.first_token_s
    for number, (when_s, count) in enumerate(answer.reads):
        if number:
            gaps.append(1e3 * (when_s - before_s))
        gaps += [0.0] * (count - 1)
        before_s = when_s
    return gaps


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def measure(load: OfferedLoad) -> CellFigures:
    """Run one cell in this process and return its figures."""
    return await LoadRun(load).run()


def main() -> None:
    """Serve cells from standard input until it ends."""
    for line in sys.stdin:
        spec: dict[str, Any] = json.loads(line)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            measured = runner.run(measure(OfferedLoad(**spec)))
        sys.stdout.write(json.dumps(asdict(measured)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
