"""What a search costs the host: the engine and its lane on a device that takes no time at all.

`make bench-search-host` writes build/bench/search_host.json. Rates are searches per second of this
process's CPU time, of all its threads: they share the interpreter's lock. Those of the wall clock
stand beside them; on a machine that others use only the former mean anything. A lone search's CPU
time stands beside how long it took: where its threads are on two cores, that is waking these, most
of all.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from rich.console import Console

from infra.bench.benchmark import Benchmark, BenchmarkResult, option
from infra.bench.results import Bar, at_least, at_most, median, number, percentiles
from infra.bench.search import vectors
from infra.processes import garbage
from tests.workers.vector.cuda.null_device import NullDevice
from workers.vector.cuda import feeds
from workers.vector.cuda.batch import BatchSettings, DeviceBatch
from workers.vector.engine import backend
from workers.vector.engine.engine import EngineSettings, SearchEngine
from workers.vector.index import inputs
from workers.vector.index.index import Index
from workers.vector.index.query import Effort, Query
from workers.vector.kernels.arrays import Array

_EFFORT = Effort(k=10, top_m=64)
_ROWS, _DIM = 2_000, 128
_BULK_PER_S, _SINGLES_PER_S, _LONE_US = 200_000, 50_000, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """How many searches."""

    queries: int = 20_000
    lone: int = 2_000
    callers: tuple[int, ...] = (64, 2_048)
    repeats: int = option(5)


async def _rates(searches: int, repeats: int, run: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
    """Medians of several runs of so many searches."""
    by_cpu, by_clock = [], []
    for _ in range(repeats):
        cpu_s, began_s = time.process_time(), time.perf_counter()
        await run()
        by_cpu.append(searches / (time.process_time() - cpu_s))
        by_clock.append(searches / (time.perf_counter() - began_s))
    return {"per_cpu_s": median(by_cpu), "per_s": median(by_clock)}


async def _measure(options: HostOptions) -> dict[str, Any]:
    rows, queries = vectors.overlapping(_ROWS, options.queries, dim=_DIM, seed=1)
    index, device = Index.build(rows, seed=1), NullDevice()
    sizes = BatchSettings(dim_max=256)
    with patch.object(backend, "cuda_device", lambda *_: device):
        engine = SearchEngine(EngineSettings(device="cuda", cuda=sizes))
    prepared = inputs.prepare(queries, _DIM, index.metric)

    async def search_one(vector: Array) -> None:
        await engine.search(index, Query(vector=vector, k=_EFFORT.k, top_m=_EFFORT.top_m))

    async def asked_by(callers: int) -> None:
        async def caller(number: int) -> None:
            for vector in queries[number::callers]:
                await search_one(vector)

        await asyncio.gather(*map(caller, range(callers)))

    async def linked() -> None:
        await engine.neighbours(index.view(), prepared, _EFFORT)

    async def fed() -> None:
        feeds.search_all(batch, _EFFORT, prepared, index.view())

    await asked_by(64)
    batch, figures = DeviceBatch(device, sizes), dict[str, Any]()
    with garbage.deferred_gc():
        cpu_s = time.process_time()
        taken_us = [await _took_us(search_one, vector) for vector in queries[: options.lone]]
        cpu_us = (time.process_time() - cpu_s) / len(taken_us) * 1e6
        figures["lone"] = percentiles(taken_us, prefix="us_p") | {"cpu_us": cpu_us}
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            f"{callers} callers": partial(asked_by, callers) for callers in options.callers
        }
        parts |= {"rows that are linked": linked, "bulk feeds": fed}
        for name, run in parts.items():
            figures[name] = await _rates(options.queries, options.repeats, run)
    await engine.close()
    return figures


async def _took_us(search: Callable[[Array], Awaitable[None]], vector: Array) -> float:
    began_s = time.perf_counter()
    await search(vector)
    return (time.perf_counter() - began_s) * 1e6


def bars(figures: dict[str, Any]) -> list[Bar]:
    """What a device is worth only if the host keeps up with it."""
    singles = [row["per_cpu_s"] for name, row in figures.items() if name.endswith("callers")]
    bulk = figures["bulk feeds"]["per_cpu_s"]
    linked = figures["rows that are linked"]["per_cpu_s"]
    return [
        at_least("bulk feeds", bulk, _BULK_PER_S, "searches per CPU s"),
        at_least("rows that are linked", linked, _BULK_PER_S, "searches per CPU s"),
        at_least("searches one by one", min(singles), _SINGLES_PER_S, "searches per CPU s"),
        at_most("a lone search, p50", figures["lone"]["us_p50"], _LONE_US, "us"),
    ]


async def run(options: HostOptions, _console: Console) -> BenchmarkResult:
    """All parts."""
    figures = await _measure(options)
    lines = [
        f"{name}: " + ", ".join(f"{key} {number(value)}" for key, value in row.items())
        for name, row in figures.items()
    ]
    return BenchmarkResult(figures=figures, bars=bars(figures), tables=lines)


BENCHMARK = Benchmark(
    name="search-host",
    about=__doc__,
    run=run,
    full=HostOptions(),
    quick=HostOptions(queries=2_000, lone=200, repeats=3),
    quick_help="a tenth of the searches",
)

if __name__ == "__main__":
    BENCHMARK.main()
