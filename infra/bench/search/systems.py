"""The vector indexes that the search benchmark compares: ours, hnswlib, faiss, usearch and SVS.

All are built with their usual settings for this size and searched the same way: arrays of queries
in one call. Systems that are not installed, or do not run on this processor, are left out;
`make bench-search` installs the peers.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from infra.bench.results import median, median_ratio
from infra.bench.search.vectors import recall
from workers.vector.index.index import Index
from workers.vector.index.query import Effort
from workers.vector.kernels.arrays import Array
from workers.vector.kernels.metrics import Metric

Search = Callable[[Array, int, int, int], Array]  # queries, k, effort, threads to rows

OURS = "trivium"
_MODULES = {"hnswlib": "hnswlib", "faiss": "faiss", "usearch": "usearch.index", "svs": "svs"}
NAMES = (OURS, *_MODULES)
_MAY_END = ("svs",)  # its codes need Intel processors; on others it ends its process
LINKS, BUILD_EFFORT = 16, 200  # of the peers: M, and the length of the list while building
_WARM_ROWS = 24_000  # enough rows for the second of our builder's two algorithms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class System:
    """A built index, and the function that searches it."""

    name: str
    build_s: float
    build_cpu_s: float
    index: Any
    search: Search


def installed() -> tuple[list[str], list[str]]:
    """Return the names of the installed systems, and a sentence for each missing one."""
    here, sentences = [OURS], []
    for name, module in _MODULES.items():
        try:
            import_module(module)
        except ImportError as error:
            sentences.append(f"{name} is left out: {error}; `make bench-search` installs it.")
            continue
        if name in _MAY_END and (refusal := _refusal(name)):
            sentences.append(f"{name} is left out: {refusal}")
        else:
            here.append(name)
    return here, sentences


def _refusal(name: str) -> str:
    """Return the last line of a system that fails on this processor; empty if it works."""
    trial = f"from {__name__} import try_out; try_out({name!r})"
    process = subprocess.run([sys.executable, "-c", trial], capture_output=True, text=True)
    lines = (process.stdout + process.stderr).strip().splitlines() or ["it ended its process"]
    return lines[-1] if process.returncode else ""


def try_out(name: str) -> None:
    """Build a small index, which may end this process."""
    build(name, np.eye(64, dtype=np.float32), threads=1, seed=0)


def build(
    name: str, vectors: Array, threads: int, seed: int, metric: Metric = Metric.SQEUCLIDEAN
) -> System:
    """Build one system's index of `vectors`, shape (rows, dim), and time it."""
    makers = {
        OURS: _ours, "hnswlib": _hnswlib, "faiss": _faiss, "usearch": _usearch, "svs": _svs
    }  # fmt: skip
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    index, search = makers[name](vectors, threads, seed, metric)
    return System(
        name=name,
        build_s=time.perf_counter() - began_s,
        build_cpu_s=time.process_time() - began_cpu_s,
        index=index,
        search=search,
    )


def warm_up(dim: int) -> None:
    """Compile our kernels, which otherwise happens on their first use."""
    vectors = np.random.default_rng(0).standard_normal((_WARM_ROWS, dim)).astype(np.float32)
    for rows in (1_200, _WARM_ROWS):
        Index.build(vectors[:rows], degree=8).search(vectors[:8])


def _ours(vectors: Array, threads: int, seed: int, metric: Metric) -> tuple[Any, Search]:
    index = Index.build(vectors, metric=metric, seed=seed, threads=threads)

    def search(queries: Array, k: int, effort: int, threads: int) -> Array:
        index.threads = threads
        return index.search(queries, Effort(k=k, top_m=effort))[0]

    return index, search


def _hnswlib(vectors: Array, threads: int, seed: int, metric: Metric) -> tuple[Any, Search]:
    import hnswlib

    space = {Metric.SQEUCLIDEAN: "l2", Metric.INNER_PRODUCT: "ip", Metric.COSINE: "cosine"}[metric]
    index = hnswlib.Index(space, vectors.shape[1])
    index.init_index(len(vectors), M=LINKS, ef_construction=BUILD_EFFORT, random_seed=seed)
    index.add_items(vectors, num_threads=threads)

    def search(queries: Array, k: int, effort: int, threads: int) -> Array:
        index.set_ef(effort)
        rows: Array = index.knn_query(queries, k, num_threads=threads)[0]
        return rows

    return index, search


def _faiss(vectors: Array, threads: int, _seed: int, metric: Metric) -> tuple[Any, Search]:
    import faiss

    faiss.omp_set_num_threads(threads)
    squared = metric is Metric.SQEUCLIDEAN
    kind = faiss.METRIC_L2 if squared else faiss.METRIC_INNER_PRODUCT
    index = faiss.IndexHNSWFlat(vectors.shape[1], LINKS, kind)
    index.hnsw.efConstruction = BUILD_EFFORT
    index.add(_unit(vectors) if metric is Metric.COSINE else vectors)

    def search(queries: Array, k: int, effort: int, threads: int) -> Array:
        faiss.omp_set_num_threads(threads)
        index.hnsw.efSearch = effort
        query_rows = _unit(queries) if metric is Metric.COSINE else queries
        rows: Array = index.search(query_rows, k)[1]
        return rows

    return index, search


def _usearch(vectors: Array, threads: int, _seed: int, metric: Metric) -> tuple[Any, Search]:
    from usearch.index import Index as Usearch

    space = {Metric.SQEUCLIDEAN: "l2sq", Metric.INNER_PRODUCT: "ip", Metric.COSINE: "cos"}[metric]
    index = Usearch(
        ndim=vectors.shape[1], metric=space, dtype="f32", connectivity=LINKS,
        expansion_add=BUILD_EFFORT,
    )  # fmt: skip
    index.add(np.arange(len(vectors)), vectors, threads=threads)

    def search(queries: Array, k: int, effort: int, threads: int) -> Array:
        index.expansion_search = effort
        rows: Array = np.asarray(index.search(queries, k, threads=threads).keys).astype(np.int64)
        return rows

    return index, search


def _svs(vectors: Array, threads: int, _seed: int, metric: Metric) -> tuple[Any, Search]:
    """Build Intel's index, with codes of 4 and 8 bits and twice the degree, as Intel advises."""
    import svs

    squared = metric is Metric.SQEUCLIDEAN
    kind = svs.DistanceType.L2 if squared else svs.DistanceType.MIP
    unit = metric is Metric.COSINE
    settings = svs.VamanaBuildParameters(graph_max_degree=2 * LINKS, window_size=BUILD_EFFORT)
    with TemporaryDirectory() as folder:
        path = str(Path(folder) / "vectors.fvecs")
        svs.write_vecs(_unit(vectors) if unit else vectors, path)
        loader = svs.LVQLoader(
            svs.VectorDataLoader(path, svs.DataType.float32), primary=4, residual=8
        )
        index = svs.Vamana.build(settings, loader, kind, num_threads=threads)

    def search(queries: Array, k: int, effort: int, threads: int) -> Array:
        index.num_threads, index.search_window_size = threads, effort
        return np.asarray(index.search(_unit(queries) if unit else queries, k)[0], np.int64)

    return index, search


def _unit(vectors: Array) -> Array:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Array = (vectors / np.where(lengths == 0, 1, lengths)).astype(np.float32)
    return scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """One measurement of a system at one effort."""

    effort: int
    recall: float
    queries_per_s: float
    queries_per_cpu_s: float


def at_recall(
    points: Sequence[OperatingPoint], target: float, *, of_cpu: bool = False
) -> float | None:
    """Return queries per second at a recall: log-linear between efforts; None beyond the ends.

    The logarithm of the missed share against the logarithm of the rate is close to a line.
    """
    ordered = sorted(points, key=lambda point: point.recall)
    if not ordered or not ordered[0].recall <= target <= ordered[-1].recall:
        return None
    missed = [-np.log(max(1e-6, 1 - point.recall)) for point in ordered]
    rates = [np.log(p.queries_per_cpu_s if of_cpu else p.queries_per_s) for p in ordered]
    return float(np.exp(np.interp(-np.log(1 - target), missed, rates)))


def at_rate(points: Sequence[OperatingPoint], queries_per_s: float) -> float | None:
    """Return the recall at a rate, on the line of `at_recall`; None beyond the ends."""
    ordered = sorted(points, key=lambda point: point.queries_per_s)
    if not ordered[0].queries_per_s <= queries_per_s <= ordered[-1].queries_per_s:
        return None
    missed = [np.log(max(1e-6, 1 - point.recall)) for point in ordered]
    rates = [np.log(point.queries_per_s) for point in ordered]
    return 1 - float(np.exp(np.interp(np.log(queries_per_s), rates, missed)))


Curves = dict[str, list[list[OperatingPoint]]]  # by system, by repeat


def measure_point(search: Callable[[], Array], effort: int, truth: Array) -> OperatingPoint:
    """Time one call that searches all queries. Recall is that of the first ones, whose true
    neighbours are known, shape (queries, k)."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    rows = search()
    took_s, took_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return OperatingPoint(
        effort=effort,
        recall=recall(rows[: len(truth)], truth),
        queries_per_s=len(rows) / took_s,
        queries_per_cpu_s=len(rows) / max(took_cpu_s, 1e-9),
    )


def measure_curves(
    systems: Mapping[str, Callable[[int], OperatingPoint]],
    efforts: Sequence[int],
    repeats: int,
    progress: Callable[[str], None],
) -> Curves:
    """Measure every system at each effort. Within a repeat systems take turns effort by effort, so
    that ratios compare measurements side by side."""
    for name, point in systems.items():
        progress(f"{name} is warmed up")
        point(efforts[0])
    curves: Curves = {name: [] for name in systems}
    for repeat in range(repeats):
        progress(f"queries in one call, repeat {repeat + 1} of {repeats}")
        for points in curves.values():
            points.append([])
        for effort in efforts:
            for name, point in systems.items():
                curves[name][-1].append(point(effort))
    return curves


def speeds(curves: Curves, recalls: Sequence[float]) -> dict[str, Any]:
    """Return by recall and system: the rates there, and how many times faster ours is."""
    out: dict[str, Any] = {}
    for target in recalls:
        rates, rates_by_cpu = (
            {
                name: [at_recall(points, target, of_cpu=of_cpu) for points in repeats]
                for name, repeats in curves.items()
            }
            for of_cpu in (False, True)
        )
        out[str(target)] = {
            name: {
                "queries_per_s": median(rates[name]),
                "queries_per_cpu_s": median(rates_by_cpu[name]),
                "trivium_times": median_ratio(rates[OURS], rates[name]),
                "trivium_times_by_cpu": median_ratio(rates_by_cpu[OURS], rates_by_cpu[name]),
            }
            for name in curves
        }
    return out


def median_curves(curves: Curves) -> dict[str, list[dict[str, Any]]]:
    """Return the points of each system, with median rates over the repeats."""
    rates = ("queries_per_s", "queries_per_cpu_s")
    return {
        name: [
            {**asdict(same[0]), **{r: median([getattr(p, r) for p in same]) for r in rates}}
            for same in zip(*repeats, strict=True)
        ]
        for name, repeats in curves.items()
    }
