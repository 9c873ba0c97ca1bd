"""The search benchmark of a CUDA device: our engine beside cuVS CAGRA, if that is installed.

`make bench-search-gpu`, or `trivium bench search-gpu --quick`. Parts: whether the device finds the
same ids as CPU cores; queries per second against recall, for each engine on each engine's graph;
single searches; and the time of each kernel with its bandwidth (`kernels_alone.py`). Writes
build/bench/search_gpu.json. Without a device it reports what is missing, and measures nothing.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.bench.benchmark import Benchmark, BenchmarkResult, option
from infra.bench.results import Bar, at_least, at_most, cell, nested, number, table
from infra.bench.search import vectors
from infra.bench.search.gpu import kernels_alone, single_searches
from infra.bench.search.gpu.kernels_alone import Stopwatch
from infra.bench.search.scene import Progress
from infra.bench.search.systems import (
    OURS,
    OperatingPoint,
    measure_curves,
    measure_point,
    median_curves,
    speeds,
)
from schemas.errors import ConfigError
from workers.vector.cuda import builder, feeds
from workers.vector.cuda.batch import BatchSettings, DeviceBatch
from workers.vector.cuda.cuvs_graph import Cagra
from workers.vector.cuda.launch import reason_against
from workers.vector.engine import backend
from workers.vector.graph.build import GraphOf
from workers.vector.index import bulk, inputs
from workers.vector.index.index import Index
from workers.vector.index.query import Effort
from workers.vector.kernels.arrays import Array
from workers.vector.limits import DEGREE

Search = Callable[[int], Array]  # effort to rows of all queries

CUVS, OURS_ON_CUVS = "cuvs", "trivium, graph of cuvs"
K = 10
_RECALLS = (0.93, 0.98)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """Sets the sizes and repeats of the GPU search benchmark."""

    rows: int = option(1_000_000)
    dim: int = 128
    queries: int = option(100_000, "of one call")
    checked: int = 2_000  # of them, whose true neighbours are computed
    efforts: tuple[int, ...] = (32, 48, 64, 96, 128, 192, 256)
    width: int = option(8)
    samplings: tuple[int, ...] = (1, 8)  # of cuVS: its random entry points
    repeats: int = option(5)
    singles: int = 2_000  # searches one after the other
    callers: int = 2_048  # concurrent ones
    asks: int = 40  # searches of each caller
    batch: BatchSettings = field(default_factory=BatchSettings)
    seed: int = option(1)


@dataclass(frozen=True, slots=True)
class GpuScene:
    """The index, queries and true neighbours that all parts share."""

    options: GpuOptions
    device: Stopwatch
    index: Index
    graph_s: float  # time to build the index's graph with our builder
    queries: Array
    truth: Array
    progress: Progress

    @classmethod
    def create(cls, options: GpuOptions, device: Stopwatch, progress: Progress) -> "GpuScene":
        progress(f"{options.rows} x {options.dim} vectors in overlapping clusters, true neighbours")
        rows, queries = vectors.overlapping(
            options.rows, options.queries, dim=options.dim, seed=options.seed
        )
        truth = vectors.truth(rows, queries[: options.checked], K)
        progress("the index is built")
        index, graph_s = _built(rows, builder.graph_on(device), options.seed)
        return cls(options, device, index, graph_s, queries, truth, progress)


def _built(rows: Array, graph_of: GraphOf, seed: int) -> tuple[Index, float]:
    """Return an index of the rows, and the seconds to build its graph."""
    graph_s = 0.0

    def timed(*arguments: Any, **keywords: Any) -> Array:
        nonlocal graph_s
        began_s = time.perf_counter()
        graph = graph_of(*arguments, **keywords)
        graph_s += time.perf_counter() - began_s
        return graph

    return Index.build(rows, seed=seed, degree=DEGREE, graph_of=timed), graph_s


def agrees(scene: GpuScene, batch: DeviceBatch) -> dict[str, Any]:
    """Run part 1: count queries for which device and cores find the same rows and distances."""
    options, view = scene.options, scene.index.view()
    effort = Effort(k=K, top_m=64, width=options.width)
    queries = inputs.prepare(scene.queries[: options.checked], view.dim, view.metric)
    cores = bulk.search_all(effort, queries, view)
    device = feeds.search_all(batch, effort, queries, view)
    same = (cores.rows == device.rows).all(1) & (cores.distances == device.distances).all(1)
    return {"queries": len(queries), "equal": int(same.sum())}


def speed(scene: GpuScene, batch: DeviceBatch) -> dict[str, Any]:
    """Run part 2: queries/s of one call. Our queries are in host memory, cuVS's on the device."""
    options = scene.options
    systems: dict[str, Search] = {OURS: _ours(scene, batch, scene.index)}
    graph_s = {OURS: scene.graph_s} | _add_cuvs(scene, batch, systems)
    points = {name: partial(_point, search, scene.truth) for name, search in systems.items()}
    curves = measure_curves(points, options.efforts, options.repeats, scene.progress)
    at_recall = speeds(curves, _RECALLS)
    return {"at_recall": at_recall, "curves": median_curves(curves), "graph_s": graph_s}


def _point(search: Search, truth: Array, effort: int) -> OperatingPoint:
    return measure_point(lambda: search(effort), effort, truth)


def _ours(scene: GpuScene, batch: DeviceBatch, index: Index) -> Search:
    options, view = scene.options, index.view()
    prepared = inputs.prepare(scene.queries, view.dim, view.metric)

    def search(top_m: int) -> Array:
        effort = Effort(k=K, top_m=top_m, width=options.width)
        return feeds.search_all(batch, effort, prepared, view).rows

    return search


def _add_cuvs(scene: GpuScene, batch: DeviceBatch, systems: dict[str, Search]) -> dict[str, float]:
    """Add CAGRA with each number of random entry points, on its own graph and on ours, and our
    engine on CAGRA's graph. Return the seconds to build that graph; nothing without cuVS.
    """
    options = scene.options
    rows = scene.index.view().vectors[: options.rows]
    began_s = time.perf_counter()
    try:
        cagra = Cagra.build(rows, DEGREE)
    except ConfigError as error:
        scene.progress(f"{CUVS} is left out: {error}")
        return {}
    graph_s = time.perf_counter() - began_s
    scene.progress("an index with the graph of cuvs is built")
    index, _ = _built(rows[:, : options.dim], lambda *_, **__: cagra.graph(), options.seed)
    systems[OURS_ON_CUVS] = _ours(scene, batch, index)
    queries = cagra.uploaded(scene.queries)

    def search(searched: Cagra, samplings: int) -> Search:
        return lambda effort: searched.search(
            queries, K, effort, samplings=samplings
        ).copy_to_host()

    with_our_graph = Cagra.of_graph(rows, scene.index.graph)
    for samplings in options.samplings:
        systems[f"{CUVS}, {samplings} samplings"] = search(cagra, samplings)
        systems[f"{CUVS}, graph of {OURS}, {samplings} samplings"] = search(
            with_our_graph, samplings
        )
    return {CUVS: graph_s}


def measure(options: GpuOptions, device: Stopwatch, progress: Progress) -> dict[str, Any]:
    """Run all parts on the device and return their figures."""
    scene = GpuScene.create(options, device, progress)
    batch = DeviceBatch(device, options.batch)
    figures: dict[str, Any] = {"device": device.name, "ids": agrees(scene, batch)}
    figures["speed"] = speed(scene, batch)
    progress("single searches, one after the other and from many callers")
    figures["singles"] = single_searches.singles(
        scene.index, scene.queries, options.batch, one_by_one=options.singles,
        callers=options.callers, asks=options.asks,
    )  # fmt: skip
    progress("each kernel is timed")
    effort = Effort(k=K, top_m=64, width=options.width)
    figures["kernels"] = kernels_alone.kernels(
        device, options.batch, scene.index, scene.queries, effort
    )
    return figures


def bars(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars, which are targets for a million rows on the largest cards."""
    ids, rate = figures["ids"], figures["speed"]["at_recall"][str(_RECALLS[0])][OURS]
    lone_ms = figures["singles"]["lone"]["ms_p50"]
    return [
        at_least("queries with the ids that cores find", ids["equal"], ids["queries"]),
        at_least(f"queries/s at recall {_RECALLS[0]}", rate["queries_per_s"], 1e6, "/s"),
        at_most("a search alone, p50", lone_ms, 0.3, "ms"),
    ]


def run(options: GpuOptions, console: Console) -> BenchmarkResult:
    """Run all parts; raises ConfigError without a CUDA device."""
    if (why := reason_against()) is not None:
        raise ConfigError(f"bench search-gpu: expected a CUDA device, found none: {why}")
    began_s = time.monotonic()

    def progress(text: str) -> None:
        console.print(f"[{time.monotonic() - began_s:4.0f} s] {text}", markup=False)

    device: Any = backend.cuda_device("cuda")
    figures = measure(options, device, progress)
    return BenchmarkResult(figures=figures, bars=bars(figures), tables=tables(figures))


def tables(figures: dict[str, Any]) -> list[Table]:
    """Return the tables of speed, single searches and kernels."""
    speed, kernels = figures["speed"], figures["kernels"]
    graphs = (
        "Ours from host memory to host memory; cuVS's queries are on the device. Seconds to make "
        f"the graph: {cell(speed['graph_s'])}."
    )
    rates = (
        f"Vectors are read at {number(kernels['read_gb_per_s'])} GB/s while slots walk: "
        f"{kernels['read_of_copy']:.0%} of a copy's {number(kernels['copy_gb_per_s'])}."
    )
    columns, singles = ("queries_per_s", "trivium_times"), ("callers", "per_s", "ms_p50", "ms_p99")
    return [
        table(
            "Queries of one call by recall", nested(speed["at_recall"]), *columns, caption=graphs
        ),
        table("Searches asked one by one", figures["singles"], *singles),
        table("Kernels", kernels["by_kernel"], caption=rates),
    ]


BENCHMARK = Benchmark(
    "search-gpu", __doc__, run, full=GpuOptions(),
    quick=GpuOptions(rows=100_000, queries=20_000, checked=1_000, repeats=3, singles=500, asks=10),
    quick_help="a tenth of the rows, less of all",
)  # fmt: skip
