"""Kinds of vectors on which graph searches have failed: named ones, and new ones drawn by seed.

What they share is that distance alone says little about where a search should begin: some clusters
are ten thousand times wider than others, outliers lie far from everything, rows are equal by the
dozen. Shapes are (rows, dim), float32; each kind gives vectors and queries.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from infra.bench.search import vectors as plain
from tests.workers.search import bundled

Array = np.ndarray[Any, Any]
Kind = Callable[[int, int], tuple[Array, Array]]  # rows and queries, both as a count and drawn

_SPLIT_SEED = 1


def few_of_each(rows: int, queries: int) -> tuple[Array, Array]:
    """The benchmark's separated clusters, with fewer rows of each."""
    return plain.separated(rows, queries)


def with_outliers(rows: int, queries: int, share: float = 0.02) -> tuple[Array, Array]:
    """Separated clusters, and rows far from all of them."""
    near, asked = plain.separated(rows, queries)
    random = np.random.default_rng(2)
    far = random.random(rows) < share
    near[far] += 200 * random.standard_normal((int(far.sum()), near.shape[1])).astype(np.float32)
    return near, asked


def many_scales(rows: int, queries: int, dim: int = 64) -> tuple[Array, Array]:
    """48 clusters as wide as 0.0001 to 10."""
    random = np.random.default_rng(3)
    scales = np.logspace(-4, 1, 48)
    centres = 3 * random.standard_normal((48, dim))
    of = random.integers(0, 48, rows + queries)
    noise = random.standard_normal((rows + queries, dim)) * scales[of, None]
    return _split(centres[of] + noise, queries)


def copies(rows: int, queries: int, dim: int = 64, each: int = 20) -> tuple[Array, Array]:
    """Each vector about `each` times; queries lie beside them."""
    random = np.random.default_rng(4)
    distinct = random.standard_normal((rows // each, dim))
    found = distinct[random.integers(0, len(distinct), rows)]
    asked = distinct[random.integers(0, len(distinct), queries)]
    return _float32(found), _float32(asked + 0.05 * random.standard_normal(asked.shape))


def equal_features(rows: int, queries: int, dim: int = 512) -> tuple[Array, Array]:
    """Features of image patches, of which many are equal: skies and walls have one grey."""
    patches, _ = bundled.patches(rows + queries, 0)
    greys = np.round(patches.reshape(len(patches), 64, 3).mean(2) * 8) / 8
    random = np.random.default_rng(5)
    features = np.maximum(0, (greys - greys.mean(0)) @ random.standard_normal((64, dim)))
    return _split(features, queries)


KINDS: dict[str, tuple[int, Kind]] = {  # with their usual number of rows
    "few_of_each": (20_000, few_of_each),
    "with_outliers": (20_000, with_outliers),
    "many_scales": (40_000, many_scales),
    "copies": (40_000, copies),
    "equal_features": (30_000, equal_features),
}


def drawn(seed: int, rows: int, queries: int) -> tuple[Array, Array]:
    """A kind that nobody chose: clusters, scales, manifolds, copies, outliers and norms by seed."""
    random = np.random.default_rng([6, seed])
    count, dim = rows + queries, int(random.choice([8, 24, 64, 160]))
    clusters = int(random.choice([1, 7, 60, 400, 1_500]))
    spread = 10.0 ** random.uniform(-1, 2)
    shares = random.dirichlet(np.full(clusters, 10.0 ** random.uniform(-1, 1)))
    of = random.choice(clusters, count, p=shares)
    inner = int(random.integers(1, dim + 1))  # dimension of a cluster
    basis = random.standard_normal((clusters, inner, dim)) / np.sqrt(inner)
    scales = 10.0 ** random.uniform(-random.choice([0, 1, 4]), 0, clusters)
    found = np.empty((count, dim))
    for each in range(clusters):
        mine = of == each
        found[mine] = random.standard_normal((int(mine.sum()), inner)) @ basis[each] * scales[each]
    found += spread * random.standard_normal((clusters, dim))[of]
    if random.random() < 0.4:  # copies
        found = found[random.integers(0, max(1, count // int(random.integers(2, 30))), count)]
    if random.random() < 0.4:  # outliers
        far = random.random(count) < 10.0 ** random.uniform(-3, -1)
        found[far] += 10 * spread * random.standard_normal((int(far.sum()), dim))
    if random.random() < 0.3:  # norms
        found *= np.exp(random.normal(0, random.choice([0.1, 0.4]), (count, 1)))
    return _split(found, queries)


def recall(vectors: Array, queries: Array, found: Array, k: int) -> float:
    """The share of `found` rows, shape (queries, k), that are as near as the true k nearest; rows
    of -1 are not."""
    hits = 0
    true = plain.truth(vectors, queries, k)
    for query, rows, expected in zip(queries, found, true, strict=True):
        farthest = _distances(vectors[expected], query).max()
        held = _distances(vectors[rows[rows >= 0]], query)
        hits += int((held <= farthest * (1 + 1e-5) + 1e-12).sum())
    return hits / found.size


def _distances(rows: Array, query: Array) -> Array:
    gaps: Array = rows.astype(np.float64) - query
    squares: Array = (gaps**2).sum(1)
    return squares


def _split(drawn: Array, queries: int) -> tuple[Array, Array]:
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(drawn))
    return _float32(drawn[order[queries:]]), _float32(drawn[order[:queries]])


def _float32(values: Array) -> Array:
    return np.ascontiguousarray(values, np.float32)
