"""Data and indexes that the tests of the vector engine share."""

from dataclasses import replace
from typing import Any

import numpy as np

from workers.vector.graph import knn, links
from workers.vector.index import audit
from workers.vector.index.index import Index
from workers.vector.index.inputs import prepare
from workers.vector.kernels.metrics import Metric, Storage

Array = np.ndarray[Any, Any]


def gaussian(rows: int, dim: int, seed: int = 0) -> Array:
    """Vectors without structure, shape (rows, dim), float32."""
    return np.random.default_rng(seed).standard_normal((rows, dim)).astype(np.float32)


def overlapping(rows: int, queries: int, dim: int = 48, seed: int = 0) -> tuple[Array, Array]:
    """Clusters that overlap, most of whose variance is in a few directions: data and queries."""
    random = np.random.default_rng(seed)
    centres, basis = random.standard_normal((50, dim)), random.standard_normal((12, dim))
    count = rows + queries
    points = (
        0.6 * centres[random.integers(0, 50, count)]
        + 0.35 * random.standard_normal((count, 12)) @ basis
        + 0.3 * random.standard_normal((count, dim))
    ).astype(np.float32)
    return points[:rows], points[rows:]


def separated(rows: int, queries: int, clusters: int, dim: int) -> tuple[Array, Array]:
    """Clusters far from each other: data and queries."""
    random = np.random.default_rng(0)
    centres = 10 * random.standard_normal((clusters, dim))
    of = random.integers(0, clusters, rows + queries)
    points = (centres[of] + random.standard_normal((rows + queries, dim))).astype(np.float32)
    return points[:rows], points[rows:]


def nearest(vectors: Array, queries: Array, k: int, allowed: Array | None = None) -> Array:
    """True neighbours by squared distance, ties by row: shape (queries, k)."""
    norms = np.einsum("ij,ij->i", vectors, vectors)
    scores = norms - 2 * (queries @ vectors.T)
    if allowed is not None:
        scores[:, ~allowed] = np.inf
    return np.argsort(scores, axis=1, kind="stable")[:, :k]


def recall(results: Array, truth: Array) -> float:
    """Share of true neighbours that were found."""
    hits = sum(len(set(a) & set(b)) for a, b in zip(results.tolist(), truth.tolist(), strict=True))
    return hits / truth.size


def lose(index: Index, share: float) -> None:
    """Take away all edges to some rows and their places among the entry points, and have the audit
    say so: as an earlier version left an index that grew."""
    is_lost = np.random.default_rng(0).random(len(index.graph)) < share
    graph = index.graph.copy()
    audit._hide(graph, is_lost)
    assert index.audit is not None
    entries = index.entries[~is_lost[index.entries]]
    index.links = links.LinkHistory(
        links.GraphLinks.first(graph, entries, index.links.newest.chain)
    )
    index.audit = replace(index.audit, missed_share=share)
    index._publish_view()


def clustered_index(rows: int = 3_000, dim: int = 20) -> Index:
    """A linked index with metadata: `part` is one of 0 to 9, `kind` even or odd."""
    metadata = [{"part": i % 10, "kind": "even" if i % 2 == 0 else "odd"} for i in range(rows)]
    return Index.build(overlapping(rows, 0, dim)[0], metadata=metadata, degree=16)


def neighbour_lists(
    vectors: Any, count: int = 24, seed: int = 0, metric: Metric = Metric.SQEUCLIDEAN
) -> Any:
    """Lists as keys that a build begins with, shape (rows, count)."""
    rows = prepare(vectors, vectors.shape[1], metric, Storage.FLOAT32)
    return knn.neighbours(rows, count, metric.number, Storage.FLOAT32.number, seed=seed, threads=1)
