"""The data-set zoo: kinds of vectors on which graph searches have failed, or might.

In most of them, distance alone is a poor guide to where a search should begin: some clusters are
ten thousand times wider than others, outliers are far from everything, dozens of rows are equal.
Each kind returns vectors and queries, float32 (rows, dim), from fixed seeds. `random_kinds.py`
draws further kinds at random.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from infra.bench.search import vectors as plain
from infra.bench.search.zoo import bundled
from workers.vector.kernels.arrays import Array
from workers.vector.kernels.metrics import Metric

Draw = Callable[[int, int], tuple[Array, Array]]  # numbers of rows and queries to arrays

_SPLIT_SEED = 1
_CLUSTERS = 48


@dataclass(frozen=True, slots=True)
class DataKind:
    """A kind of data, with its full size and its usual metric."""

    draw: Draw
    rows: int  # full size
    metric: Metric = Metric.SQEUCLIDEAN


def few_of_each(rows: int, queries: int) -> tuple[Array, Array]:
    """Return the benchmark's separated clusters, with fewer rows of each."""
    return plain.separated(rows, queries)


def with_outliers(rows: int, queries: int, share: float = 0.02) -> tuple[Array, Array]:
    """Return separated clusters, and rows far from all of them."""
    near, query_rows = plain.separated(rows, queries)
    random = np.random.default_rng(2)
    outliers = random.random(rows) < share
    near[outliers] += 200 * random.standard_normal((int(outliers.sum()), near.shape[1])).astype(
        np.float32
    )
    return near, query_rows


def one_wild_row(rows: int, queries: int) -> tuple[Array, Array]:
    """Return overlapping clusters, with one row multiplied by a hundred."""
    usual, query_rows = plain.overlapping(rows, queries)
    usual[rows // 2] *= 100
    return usual, query_rows


def many_scales(rows: int, queries: int, dim: int = 64, apart: float = 3) -> tuple[Array, Array]:
    """Return clusters with widths from 0.0001 to 10."""
    random = np.random.default_rng(3)
    scales = np.logspace(-4, 1, _CLUSTERS)
    centres = apart * random.standard_normal((_CLUSTERS, dim))
    labels = random.integers(0, _CLUSTERS, rows + queries)
    noise = random.standard_normal((rows + queries, dim)) * scales[labels, None]
    return split(centres[labels] + noise, queries)


def close_scales(rows: int, queries: int) -> tuple[Array, Array]:
    """Return `many_scales` with centres three times closer: narrow clusters lie in wide ones."""
    return many_scales(rows, queries, apart=1)


def copies(rows: int, queries: int, dim: int = 64, repeats: int = 20) -> tuple[Array, Array]:
    """Return copies of random vectors, each about `repeats` times, and queries near them."""
    random = np.random.default_rng(4)
    distinct = random.standard_normal((rows // repeats, dim))
    points = distinct[random.integers(0, len(distinct), rows)]
    query_rows = distinct[random.integers(0, len(distinct), queries)]
    return float32(points), float32(query_rows + 0.05 * random.standard_normal(query_rows.shape))


def many_copies_of_few(rows: int, queries: int, dim: int = 32) -> tuple[Array, Array]:
    """Return rows of which half are copies of 20 vectors, like empty pages in a collection."""
    random = np.random.default_rng(7)
    points = random.standard_normal((rows + queries, dim))
    often = random.random(rows + queries) < 0.5
    points[often] = points[random.integers(0, 20, int(often.sum()))]
    return split(points, queries)


def equal_features(rows: int, queries: int, dim: int = 512) -> tuple[Array, Array]:
    """Return features of image patches, many of them equal: skies and walls have one grey."""
    patches, _ = bundled.patches(rows + queries, 0)
    greys = np.round(patches.reshape(len(patches), 64, 3).mean(2) * 8) / 8
    random = np.random.default_rng(5)
    features = np.maximum(0, (greys - greys.mean(0)) @ random.standard_normal((64, dim)))
    return split(features, queries)


def one_dimension(rows: int, queries: int) -> tuple[Array, Array]:
    """Return points on a line: vectors of one dimension."""
    return split(np.random.default_rng(8).standard_normal((rows + queries, 1)), queries)


def log_normal_norms(rows: int, queries: int, dim: int = 96) -> tuple[Array, Array]:
    """Return random directions and lengths with a long tail, for inner products."""
    random = np.random.default_rng(9)
    points = random.standard_normal((rows + queries, 24)) @ random.standard_normal((24, dim))
    points += random.standard_normal(points.shape)
    lengths = np.exp(random.normal(0, 0.4, (len(points), 1)))
    return split(points / np.linalg.norm(points, axis=1, keepdims=True) * lengths, queries)


def heavy_tails(rows: int, queries: int, dim: int = 48) -> tuple[Array, Array]:
    """Return Student's t with two degrees of freedom in each direction of a subspace."""
    random = np.random.default_rng(10)
    inner = random.standard_t(2, (rows + queries, 12))
    return split(inner @ random.standard_normal((12, dim)), queries)


def mixture(rows: int, queries: int, dim: int = 64) -> tuple[Array, Array]:
    """Return parts of other kinds in one collection, truncated or zero-padded to `dim` values."""
    parts = (
        few_of_each, with_outliers, many_scales, copies, many_copies_of_few, one_dimension,
        heavy_tails, bundled.patches,
    )  # fmt: skip
    arrays = []
    for part in parts:
        every = np.concatenate(part(rows // len(parts) + 1, queries // len(parts) + 1))
        arrays.append(np.zeros((len(every), dim), np.float32))
        arrays[-1][:, : every.shape[1]] = every[:, :dim]
    return split(np.concatenate(arrays)[: rows + queries], queries)


KINDS: dict[str, DataKind] = {
    "overlapping": DataKind(plain.overlapping, 100_000),
    "few_of_each": DataKind(few_of_each, 40_000),
    "with_outliers": DataKind(with_outliers, 40_000),
    "one_wild_row": DataKind(one_wild_row, 60_000),
    "many_scales": DataKind(many_scales, 40_000),
    "close_scales": DataKind(close_scales, 40_000),
    "copies": DataKind(copies, 40_000),
    "many_copies_of_few": DataKind(many_copies_of_few, 40_000),
    "equal_features": DataKind(equal_features, 30_000),
    "one_dimension": DataKind(one_dimension, 50_000),
    "log_normal_norms": DataKind(log_normal_norms, 40_000, Metric.INNER_PRODUCT),
    "heavy_tails": DataKind(heavy_tails, 40_000),
    "text": DataKind(bundled.texts, 30_000, Metric.COSINE),
    "patches": DataKind(bundled.patches, 30_000),
    "mixture": DataKind(mixture, 40_000),
}


def split(points: Array, queries: int) -> tuple[Array, Array]:
    """Return rows, and the queries that are held out of them."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(points))
    return float32(points[order[queries:]]), float32(points[order[:queries]])


def float32(values: Array) -> Array:
    """Return the values as a contiguous float32 array."""
    return np.ascontiguousarray(values, np.float32)
