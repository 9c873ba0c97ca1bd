"""Draws kinds of data from a seed, so that no engine can be tuned to a fixed list.

They combine clusters, scales, manifolds, copies, outliers and norms."""

import numpy as np

from infra.bench.search.zoo.kinds import DataKind, split
from workers.vector.kernels.arrays import Array
from workers.vector.kernels.metrics import Metric

_METRICS = (Metric.SQEUCLIDEAN, Metric.SQEUCLIDEAN, Metric.COSINE, Metric.INNER_PRODUCT)


def random_kind(seed: int, rows: int = 30_000) -> DataKind:
    """Return the kind of a seed, which also decides its metric."""
    metric = _METRICS[int(np.random.default_rng([11, seed]).integers(0, len(_METRICS)))]
    return DataKind(lambda count, queries: vectors(seed, count, queries), rows, metric)


def vectors(seed: int, rows: int, queries: int) -> tuple[Array, Array]:
    """Return the vectors and queries of a seed."""
    random = np.random.default_rng([6, seed])
    count, dim = rows + queries, int(random.choice([8, 24, 64, 160]))
    clusters = int(random.choice([1, 7, 60, 400, 1_500]))
    spread = 10.0 ** random.uniform(-1, 2)
    shares = random.dirichlet(np.full(clusters, 10.0 ** random.uniform(-1, 1)))
    labels = random.choice(clusters, count, p=shares)
    inner = int(random.integers(1, dim + 1))  # dimension of a cluster
    basis = random.standard_normal((clusters, inner, dim)) / np.sqrt(inner)
    scales = 10.0 ** random.uniform(-random.choice([0, 1, 4]), 0, clusters)
    points = np.empty((count, dim))
    for cluster in range(clusters):
        members = labels == cluster
        points[members] = (
            random.standard_normal((int(members.sum()), inner)) @ basis[cluster] * scales[cluster]
        )
    points += spread * random.standard_normal((clusters, dim))[labels]
    if random.random() < 0.4:  # copies
        points = points[random.integers(0, max(1, count // int(random.integers(2, 30))), count)]
    if random.random() < 0.4:  # outliers
        outliers = random.random(count) < 10.0 ** random.uniform(-3, -1)
        points[outliers] += 10 * spread * random.standard_normal((int(outliers.sum()), dim))
    if random.random() < 0.3:  # norms
        points *= np.exp(random.normal(0, random.choice([0.1, 0.4]), (count, 1)))
    return split(points, queries)
