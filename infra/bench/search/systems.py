"""The vector indexes that the search benchmark compares: ours, hnswlib, faiss and usearch.

All are built with their usual settings for this size and asked the same way: arrays of queries in
one call. What is not installed is left out; `make bench-search` installs the peers.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from workers.search.index.index import Index
from workers.search.index.query import Effort
from workers.search.kernels.arrays import Array

Search = Callable[[Array, int, int, int], Array]  # queries, k, effort, threads: rows

OURS = "trivium"
NAMES = (OURS, "hnswlib", "faiss", "usearch")
LINKS, BUILD_EFFORT = 16, 200  # of the peers: M, and the length of the list while building
_WARM_ROWS = 24_000  # beyond which our builder takes the other of its two ways


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class System:
    """A built index."""

    name: str
    build_s: float
    build_cpu_s: float
    index: Any
    search: Search


def installed() -> tuple[list[str], list[str]]:
    """Names of systems that are here, and a sentence for each that is not."""
    here, sentences = [OURS], []
    for name in NAMES[1:]:
        try:
            import_module(name if name != "usearch" else "usearch.index")
        except ImportError as error:
            sentences.append(f"{name} is left out: {error}; `make bench-search` installs it.")
        else:
            here.append(name)
    return here, sentences


def build(name: str, vectors: Array, threads: int, seed: int) -> System:
    """Build one system's index of `vectors`, shape (rows, dim), and time it."""
    make = {OURS: _ours, "hnswlib": _hnswlib, "faiss": _faiss, "usearch": _usearch}[name]
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    index, search = make(vectors, threads, seed)
    return System(
        name=name,
        build_s=time.perf_counter() - began_s,
        build_cpu_s=time.process_time() - began_cpu_s,
        index=index,
        search=search,
    )


def warm_up(dim: int) -> None:
    """Compile our kernels, which the first use ever does."""
    vectors = np.random.default_rng(0).standard_normal((_WARM_ROWS, dim)).astype(np.float32)
    for rows in (1_200, _WARM_ROWS):
        Index.build(vectors[:rows], degree=8).search(vectors[:8])


def _ours(vectors: Array, threads: int, seed: int) -> tuple[Any, Search]:
    index = Index.build(vectors, seed=seed, threads=threads)

    def search(queries: Array, k: int, effort: int, threads: int) -> Array:
        index.threads = threads
        return index.search(queries, Effort(k=k, top_m=effort))[0]

    return index, search


def _hnswlib(vectors: Array, threads: int, seed: int) -> tuple[Any, Search]:
    import hnswlib

    index = hnswlib.Index("l2", vectors.shape[1])
    index.init_index(len(vectors), M=LINKS, ef_construction=BUILD_EFFORT, random_seed=seed)
    index.add_items(vectors, num_threads=threads)

    def search(queries: Array, k: int, effort: int, threads: int) -> Array:
        index.set_ef(effort)
        rows: Array = index.knn_query(queries, k, num_threads=threads)[0]
        return rows

    return index, search


def _faiss(vectors: Array, threads: int, _seed: int) -> tuple[Any, Search]:
    import faiss

    faiss.omp_set_num_threads(threads)
    index = faiss.IndexHNSWFlat(vectors.shape[1], LINKS)
    index.hnsw.efConstruction = BUILD_EFFORT
    index.add(vectors)

    def search(queries: Array, k: int, effort: int, threads: int) -> Array:
        faiss.omp_set_num_threads(threads)
        index.hnsw.efSearch = effort
        rows: Array = index.search(queries, k)[1]
        return rows

    return index, search


def _usearch(vectors: Array, threads: int, _seed: int) -> tuple[Any, Search]:
    from usearch.index import Index as Usearch

    index = Usearch(
        ndim=vectors.shape[1], metric="l2sq", dtype="f32", connectivity=LINKS,
        expansion_add=BUILD_EFFORT,
    )  # fmt: skip
    index.add(np.arange(len(vectors)), vectors, threads=threads)

    def search(queries: Array, k: int, effort: int, threads: int) -> Array:
        index.expansion_search = effort
        rows: Array = np.asarray(index.search(queries, k, threads=threads).keys).astype(np.int64)
        return rows

    return index, search


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """One measurement of a system at one effort."""

    effort: int
    recall: float
    queries_per_s: float
    queries_per_cpu_s: float


def at_recall(
    points: Sequence[OperatingPoint], recall: float, *, of_cpu: bool = False
) -> float | None:
    """Queries per second at a recall: log-linear between efforts; None beyond the ends.

    The logarithm of what is missed against the logarithm of the rate is close to a line.
    """
    ordered = sorted(points, key=lambda point: point.recall)
    if not ordered or not ordered[0].recall <= recall <= ordered[-1].recall:
        return None
    missed = [-np.log(max(1e-6, 1 - point.recall)) for point in ordered]
    rates = [np.log(p.queries_per_cpu_s if of_cpu else p.queries_per_s) for p in ordered]
    return float(np.exp(np.interp(-np.log(1 - recall), missed, rates)))


def at_rate(points: Sequence[OperatingPoint], queries_per_s: float) -> float | None:
    """Recall at so many queries per second: the same line, read the other way."""
    ordered = sorted(points, key=lambda point: point.queries_per_s)
    if not ordered[0].queries_per_s <= queries_per_s <= ordered[-1].queries_per_s:
        return None
    missed = [np.log(max(1e-6, 1 - point.recall)) for point in ordered]
    rates = [np.log(point.queries_per_s) for point in ordered]
    return 1 - float(np.exp(np.interp(np.log(queries_per_s), rates, missed)))
