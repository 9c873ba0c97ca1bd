"""Sends searches of decode and of prefill to one server, for the mixed traffic of the benchmark.

Four in five are decode's, with a short routing list; the others are prefill's, with a long one and
a deadline. Times count from when an arrival was due, less the error of the event loop's timer,
which wakes up to 1 ms late. The load shares the server's event loop, so it does little work.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infra.bench.results import median, percentiles
from infra.bench.search.parts.mixed_servers import BATCH, THREADS, TOP_M, SearchServer
from schemas.errors import TriviumError
from streams.log.clock import wall_ms
from workers.vector.index.kinds import SearchKind
from workers.vector.kernels.arrays import Array

PREFILL_SHARE = 0.2
DEADLINE_MS = (20, 80)  # of prefill, after arrival; an idle engine needs about 1 ms
_TIMER_S = 0.001
_IN_FLIGHT_MAX = 4_096  # of an open loop; further arrivals count as errors
_CALLERS = 2 * BATCH * THREADS
_DRAWN = 1_024  # searches drawn at a time
_SUMMED = ("prefill_misses", "errors", "decode_searches", "prefill_searches")


@dataclass(slots=True)
class TrafficCell:
    """The figures of one load on one server."""

    took_ms: dict[SearchKind, list[float]] = field(default_factory=lambda: {k: [] for k in TOP_M})
    prefill_misses: int = 0
    errors: int = 0
    asked_per_s: float = 0.0
    took_s: float = 0.0
    cpu_s: float = 0.0  # of all threads of this process
    loop_s: float = 0.0  # CPU time of the event loop's thread
    occupancy: float | None = None

    def figures(self) -> dict[str, Any]:
        count = sum(map(len, self.took_ms.values()))
        row: dict[str, Any] = {
            "asked_per_s": self.asked_per_s,
            "searches_per_s": count / self.took_s,
            "cpu_us_per_search": 1e6 * self.cpu_s / max(1, count),
            "loop_us_per_search": 1e6 * self.loop_s / max(1, count),
            "prefill_misses": self.prefill_misses,
            "errors": self.errors,
            "occupancy": self.occupancy,
        }
        for kind, times_ms in self.took_ms.items():
            row |= percentiles(times_ms, (50, 95, 99), f"{kind}_ms_p")
            row[f"{kind}_searches"] = len(times_ms)
        return row


def in_all(cells: Sequence[TrafficCell]) -> dict[str, Any]:
    """Return the figures of several runs of a load: medians, or sums of counts, and all `runs`."""
    runs = [cell.figures() for cell in cells]
    row: dict[str, Any] = {"runs": runs}
    for key in runs[0]:
        values = [run[key] for run in runs]
        row[key] = sum(values) if key in _SUMMED else median(values)
    return row


class MixedTraffic:
    """Sends searches of decode and prefill to one server."""

    def __init__(self, server: SearchServer, queries: Array, seed: int) -> None:
        self._server, self._queries = server, queries
        self._random = np.random.default_rng(seed)
        self._searches_ahead: list[tuple[int, bool, int]] = []
        self._under_way = 0  # of an open loop
        self._none_left = asyncio.Event()

    async def closed(self, seconds: float, callers: int = _CALLERS) -> TrafficCell:
        """Run callers that each search again as soon as they have an answer."""
        cell, until_s = TrafficCell(), time.perf_counter() + seconds

        async def ask() -> None:
            while time.perf_counter() < until_s:
                await self._search(cell, time.perf_counter(), *self._next_search())

        return await self._measure(cell, [ask() for _ in range(callers)])

    async def open(self, rate_per_s: float, seconds: float) -> TrafficCell:
        """Send searches as Poisson arrivals at this rate."""
        cell = TrafficCell(asked_per_s=rate_per_s)
        count = max(1, int(rate_per_s * seconds))
        due_s = np.cumsum(self._random.exponential(1 / rate_per_s, count)).tolist()
        return await self._measure(cell, [self._send(cell, due_s)])

    async def _send(self, cell: TrafficCell, due_s: list[float]) -> None:
        began_s, now_s, begin = time.perf_counter(), time.perf_counter, asyncio.create_task
        for at_s in due_s:
            if (wait_s := began_s + at_s - now_s()) > 0:
                await asyncio.sleep(wait_s)
            search = self._next_search()
            if self._under_way >= _IN_FLIGHT_MAX:
                cell.errors += 1
                continue
            self._under_way += 1  # the future that a task awaits keeps it alive
            begin(self._send_one(cell, min(now_s(), began_s + at_s + _TIMER_S), *search))
        while self._under_way:
            self._none_left.clear()
            await self._none_left.wait()

    async def _send_one(self, *search: Any) -> None:
        try:
            await self._search(*search)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._none_left.set()

    def _next_search(self) -> tuple[Array, SearchKind, int]:
        if not self._searches_ahead:  # drawing them one by one costs a fifth of a search
            urgent = self._random.random(_DRAWN) < PREFILL_SHARE
            rows = self._random.integers(len(self._queries), size=_DRAWN)
            waits_ms = self._random.integers(*DEADLINE_MS, size=_DRAWN)
            self._searches_ahead = list(
                zip(rows.tolist(), urgent.tolist(), waits_ms.tolist(), strict=True)
            )
        row, is_urgent, wait_ms = self._searches_ahead.pop()
        return self._queries[row], SearchKind.PREFILL if is_urgent else SearchKind.DECODE, wait_ms

    async def _search(
        self, cell: TrafficCell, counted_s: float, vector: Array, kind: SearchKind, wait_ms: int
    ) -> None:
        deadline_ms = wall_ms() + wait_ms if kind is SearchKind.PREFILL else None
        try:
            await self._server.search(vector, kind, deadline_ms)
        except TriviumError:
            cell.errors += kind is SearchKind.DECODE
            cell.prefill_misses += kind is SearchKind.PREFILL
            return
        took_ms = (time.perf_counter() - counted_s) * 1_000
        cell.took_ms[kind].append(took_ms)
        cell.prefill_misses += kind is SearchKind.PREFILL and took_ms > wait_ms

    async def _measure(
        self, cell: TrafficCell, work: list[Coroutine[Any, Any, None]]
    ) -> TrafficCell:
        used, places = self._server.places_used()
        began_s = time.perf_counter(), time.process_time(), time.thread_time()
        await asyncio.gather(*work)
        cell.took_s = time.perf_counter() - began_s[0]
        cell.cpu_s, cell.loop_s = time.process_time() - began_s[1], time.thread_time() - began_s[2]
        used_after, places_after = self._server.places_used()
        if places_after > places:
            cell.occupancy = (used_after - used) / (places_after - places)
        return cell
