"""Part of the search benchmark: searches of decode and of prefill through one server, open loop.

Four in five are decode's, with a short routing list; the others are prefill's, with a long one and
a deadline. The capacity of a server is what callers get who always have some searches under way.
Open loops then send Poisson arrivals at shares of our engine's capacity, whatever the server does.
Times count from when an arrival was due, less the event loop's timer, which wakes up to 1 ms late.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infra import collector
from infra.bench.report import BENCH_DIR, Bar, at_least, at_most, percentile
from infra.bench.search_index import Scene, measure_point
from infra.bench.search_servers import (
    PLACES,
    THREADS,
    TOP_M,
    Engine,
    Hnswlib,
    K,
    Server,
    StaticBatches,
)
from infra.bench.search_systems import OURS
from schemas.errors import TriviumError
from schemas.log.clock import wall_ms
from workers.search.query import Kind

Array = np.ndarray[Any, Any]

PREFILL_SHARE = 0.2
DEADLINE_MS = (20, 80)  # of prefill, after arrival; an idle engine needs about 1 ms
_TIMER_S = 0.001
_UNLOADED_PER_S, _WARM_UP_S = 100, 0.3
_IN_FLIGHT_MAX = 4_096  # of an open loop; what comes beyond is counted as a miss
_CALLERS = 2 * PLACES * THREADS
_DRAWN = 1_024  # searches that are drawn at once
_LADDER = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384)


@dataclass(slots=True)
class Cell:
    """One load on one server."""

    took_ms: dict[Kind, list[float]] = field(default_factory=lambda: {k: [] for k in TOP_M})
    prefill_misses: int = 0
    errors: int = 0
    asked_per_s: float = 0.0
    took_s: float = 0.0
    occupancy: float | None = None

    def figures(self) -> dict[str, Any]:
        done = sum(map(len, self.took_ms.values()))
        row: dict[str, Any] = {
            "asked_per_s": self.asked_per_s,
            "searches_per_s": done / self.took_s,
            "prefill_misses": self.prefill_misses,
            "errors": self.errors,
            "occupancy": self.occupancy,
        }
        for kind, taken in self.took_ms.items():
            for percent in (50, 95, 99):
                row[f"{kind}_ms_p{percent}"] = percentile(taken, percent)
            row[f"{kind}_searches"] = len(taken)
        return row


class Traffic:
    """Drives one server."""

    def __init__(self, server: Server, queries: Array, seed: int) -> None:
        self._server, self._queries = server, queries
        self._random = np.random.default_rng(seed)
        self._drawn_ahead: list[tuple[int, bool, int]] = []

    async def closed(self, seconds: float, callers: int = _CALLERS) -> Cell:
        """Each caller asks again as soon as it is answered."""
        cell, until_s = Cell(), time.perf_counter() + seconds

        async def ask() -> None:
            while time.perf_counter() < until_s:
                await self._one(cell, time.perf_counter(), *self._drawn())

        return await self._timed(cell, [ask() for _ in range(callers)])

    async def open(self, rate_per_s: float, seconds: float) -> Cell:
        """Poisson arrivals."""
        cell = Cell(asked_per_s=rate_per_s)
        count = max(1, int(rate_per_s * seconds))
        due_s = np.cumsum(self._random.exponential(1 / rate_per_s, count)).tolist()
        return await self._timed(cell, [self._send(cell, due_s)])

    async def _send(self, cell: Cell, due_s: list[float]) -> None:
        began_s = time.perf_counter()
        under_way: set[asyncio.Task[None]] = set()
        for at_s in due_s:
            if (wait_s := began_s + at_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            vector, kind, wait_ms = self._drawn()
            if len(under_way) >= _IN_FLIGHT_MAX:
                cell.errors += 1
                continue
            counted_s = min(time.perf_counter(), began_s + at_s + _TIMER_S)
            task = asyncio.create_task(self._one(cell, counted_s, vector, kind, wait_ms))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)

    def _drawn(self) -> tuple[Array, Kind, int]:
        if not self._drawn_ahead:  # many at once: one by one they cost a fifth of a search
            urgent = self._random.random(_DRAWN) < PREFILL_SHARE
            rows = self._random.integers(len(self._queries), size=_DRAWN)
            waits_ms = self._random.integers(*DEADLINE_MS, size=_DRAWN)
            self._drawn_ahead = list(
                zip(rows.tolist(), urgent.tolist(), waits_ms.tolist(), strict=True)
            )
        row, is_urgent, wait_ms = self._drawn_ahead.pop()
        return self._queries[row], Kind.PREFILL if is_urgent else Kind.DECODE, wait_ms

    async def _one(
        self, cell: Cell, counted_s: float, vector: Array, kind: Kind, wait_ms: int
    ) -> None:
        deadline_ms = wall_ms() + wait_ms if kind is Kind.PREFILL else None
        try:
            await self._server.search(vector, kind, deadline_ms)
        except TriviumError:
            cell.errors += kind is Kind.DECODE
            cell.prefill_misses += kind is Kind.PREFILL
            return
        took_ms = (time.perf_counter() - counted_s) * 1_000
        cell.took_ms[kind].append(took_ms)
        cell.prefill_misses += kind is Kind.PREFILL and took_ms > wait_ms

    async def _timed(self, cell: Cell, work: list[Coroutine[Any, Any, None]]) -> Cell:
        used, places = self._server.places_used()
        began_s = time.perf_counter()
        await asyncio.gather(*work)
        cell.took_s = time.perf_counter() - began_s
        used_after, places_after = self._server.places_used()
        if places_after > places:
            cell.occupancy = (used_after - used) / (places_after - places)
        return cell


def mixed(scene: Scene) -> tuple[dict[str, Any], list[Bar]]:
    """Part 4: capacities, and times under load."""
    index = scene.system(OURS).index
    makers: dict[str, Callable[[], Server]] = {
        OURS: lambda: Engine(index),
        "static batches": lambda: StaticBatches(index),
    }
    efforts: dict[Kind, int] = {}
    if "hnswlib" in scene.names:
        peer = scene.system("hnswlib")
        efforts = _equal_efforts(scene)
        folder = BENCH_DIR / "search"
        makers["hnswlib per query"] = lambda: Hnswlib(peer.index, efforts, folder)
    figures: dict[str, Any] = asyncio.run(_measure(scene, makers))
    figures["hnswlib_efforts"] = {str(kind): effort for kind, effort in efforts.items()}
    return figures, _bars(figures)


def _equal_efforts(scene: Scene) -> dict[Kind, int]:
    """The least effort with which hnswlib finds about as much as we do, by class."""
    queries, truth = scene.queries[:500], scene.truth[:500]
    found = {}
    for kind, top_m in TOP_M.items():
        wanted = measure_point(scene.system(OURS), queries, truth, top_m).recall - 0.005
        points = (measure_point(scene.system("hnswlib"), queries, truth, e) for e in _LADDER)
        found[kind] = next((p.effort for p in points if p.recall >= wanted), _LADDER[-1])
    return found


async def _measure(scene: Scene, makers: dict[str, Callable[[], Server]]) -> dict[str, Any]:
    servers = {name: make() for name, make in makers.items()}
    traffic = {name: Traffic(s, scene.queries, scene.options.seed) for name, s in servers.items()}
    for each in traffic.values():
        await each.closed(_WARM_UP_S)
    with collector.spared():  # as a retrieval worker: a full collection stops all for 30-40 ms
        figures = await _figures(scene, traffic)
    for server in servers.values():
        await server.close()
    return {"servers": figures, "k": K, "top_m": {str(k): m for k, m in TOP_M.items()}}


async def _figures(scene: Scene, traffic: dict[str, Traffic]) -> dict[str, Any]:
    seconds, capacities = scene.options.load_s, {name: list[float]() for name in traffic}
    for repeat in range(scene.options.repeats):
        for name, each in traffic.items():
            scene.progress(f"mixed traffic: capacity of {name}, repeat {repeat + 1}")
            cell = await each.closed(max(0.3, seconds / 2))
            capacities[name].append(cell.figures()["searches_per_s"])
    figures: dict[str, Any] = {name: {"capacities_per_s": c} for name, c in capacities.items()}
    for name, rates in capacities.items():
        figures[name]["capacity_per_s"] = percentile(rates, 50)
    for name, each in traffic.items():
        scene.progress(f"mixed traffic: {name} unloaded")
        figures[name]["unloaded"] = (await each.open(_UNLOADED_PER_S, 2 * seconds)).figures()
        figures[name]["loads"] = {}
    for share in scene.options.load_shares:
        rate_per_s = share * figures[OURS]["capacity_per_s"]
        for name, each in traffic.items():
            if share > 1.2 * figures[name]["capacity_per_s"] / figures[OURS]["capacity_per_s"]:
                continue  # far beyond what it can do
            scene.progress(f"mixed traffic: {name} at {rate_per_s:.0f} searches/s")
            figures[name]["loads"][str(share)] = (await each.open(rate_per_s, seconds)).figures()
    return figures


def _kept_up_to(servers: dict[str, Any], name: str, decode_ms: float) -> float:
    """The highest rate at which decode's p99 is within `decode_ms` and 99 % of prefill in time."""
    return max(
        (
            row["asked_per_s"]
            for row in servers[name]["loads"].values()
            if row["decode_ms_p99"] is not None and row["decode_ms_p99"] <= decode_ms
            and row["prefill_misses"] <= 0.01 * (row["prefill_searches"] + row["prefill_misses"])
        ),
        default=0.0,
    )  # fmt: skip


def _bars(figures: dict[str, Any]) -> list[Bar]:
    servers = figures["servers"]
    ours = servers[OURS]
    unloaded_ms, loaded = ours["unloaded"]["decode_ms_p99"], ours["loads"]["0.8"]
    limit_ms = 2 * (unloaded_ms or 0.0)
    for name, row in servers.items():
        row["kept_up_to_per_s"] = _kept_up_to(servers, name, limit_ms)
    capacity = ours["capacity_per_s"]
    static = servers["static batches"]
    kept = static["kept_up_to_per_s"]
    slower = loaded["decode_ms_p99"] / unloaded_ms if unloaded_ms else None
    bars = [
        at_most("decode p99 at 80 % of capacity, of unloaded", slower, 2, "times"),
        at_most("prefill deadlines missed at 80 %", loaded["prefill_misses"], 0, "searches"),
        at_least("capacity, of static batches'", capacity / static["capacity_per_s"], 2, "times"),
        at_least("rate kept up with at that p99, of static batches'",
                 ours["kept_up_to_per_s"] / kept if kept else None, 2, "times"),
    ]  # fmt: skip
    if (peer := servers.get("hnswlib per query")) is not None:
        ratio = capacity / peer["capacity_per_s"]
        bars.append(at_least("capacity, of hnswlib's called per query", ratio, 1, "times"))
    return bars
