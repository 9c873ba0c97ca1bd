"""Floors of recall, on data that graph searches find easy and on data that they find hard."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from infra.bench.search import vectors as drawn
from infra.bench.search.zoo import bundled
from tests.workers.vector.data import (
    gaussian,
    lose,
    nearest,
    overlapping,
    recall,
    separated,
)
from workers.vector.filters.filters import EqualFilter
from workers.vector.graph import build, duplicates
from workers.vector.index.index import Index
from workers.vector.index.query import Effort
from workers.vector.kernels.metrics import Metric, Storage

USUAL = Effort(k=1, top_m=64)


def test_index_reaches_recall_floor_on_separated_clusters() -> None:
    """Random entry points find a quarter of the neighbours here."""
    vectors, queries = separated(40_000, 400, clusters=400, dim=64)
    index = Index.build(vectors)
    assert len(np.unique(build.components(index.graph))) > 100
    rows, _ = index.search(queries, Effort(k=10, top_m=64))
    assert recall(rows, nearest(vectors, queries, 10)) >= 0.99


@pytest.fixture(scope="module")
def hard() -> tuple[Index, np.ndarray, np.ndarray]:
    vectors, queries = overlapping(8_000, 300)
    metadata = [{"part": i % 3} for i in range(len(vectors))]
    return Index.build(vectors, metadata=metadata), vectors, queries


@pytest.mark.parametrize(("top_m", "floor"), [(32, 0.93), (64, 0.97), (128, 0.99)])
def test_index_reaches_recall_floor_on_overlapping_clusters(
    hard: tuple[Index, np.ndarray, np.ndarray], top_m: int, floor: float
) -> None:
    index, vectors, queries = hard
    rows, _ = index.search(queries, Effort(k=10, top_m=top_m))
    assert recall(rows, nearest(vectors, queries, 10)) >= floor


def test_filtered_search_reaches_recall_floor(hard: tuple[Index, np.ndarray, np.ndarray]) -> None:
    """A filter that two thirds of rows pass is walked, one for a third is scanned or walked."""
    index, vectors, queries = hard
    parts = np.arange(len(vectors)) % 3
    for where, allowed in (
        (~EqualFilter("part", 0), parts != 0),
        (EqualFilter("part", 0), parts == 0),
    ):
        rows, _ = index.search(queries, Effort(k=10, top_m=64, where=where))
        assert recall(rows, nearest(vectors, queries, 10, allowed)) >= 0.96
        assert allowed[rows].all()


def test_search_finds_rows_by_their_own_vectors(hard: tuple[Index, np.ndarray, np.ndarray]) -> None:
    index, vectors, _ = hard
    rows, distances = index.search(vectors[::10], Effort(k=1, top_m=64))
    assert (rows[:, 0] == np.arange(0, len(vectors), 10)).mean() >= 0.999
    assert (distances[:, 0] == 0).mean() >= 0.999


@pytest.mark.parametrize("metric", [Metric.INNER_PRODUCT, Metric.COSINE])
def test_half_precision_index_keeps_recall_for_other_metrics(metric: Metric) -> None:
    vectors, queries = overlapping(3_000, 200)
    index = Index.build(vectors, metric=metric, storage=Storage.FLOAT16)
    rows, _ = index.search(queries, Effort(k=10, top_m=96))
    scores = -queries @ vectors.T
    if metric is Metric.COSINE:
        scores /= np.linalg.norm(vectors, axis=1)
    truth = np.argsort(scores, axis=1)[:, :10]
    assert recall(rows, truth) >= 0.95


def test_index_reaches_recall_floor_on_image_patches() -> None:
    """8 x 8 patches of smooth images: neighbours overlap, as in real ones."""
    random = np.random.default_rng(0)
    noise = np.fft.fft2(random.standard_normal((160, 160)))
    falloff = 1 / (1 + 40 * np.add.outer(np.fft.fftfreq(160) ** 2, np.fft.fftfreq(160) ** 2) * 160)
    image = np.fft.ifft2(noise * falloff).real.astype(np.float32)
    patches = np.lib.stride_tricks.sliding_window_view(image, (8, 8))[::2, ::2].reshape(-1, 64)
    chosen = random.permutation(len(patches))
    vectors, queries = patches[chosen[200:]], patches[chosen[:200]]
    rows, _ = Index.build(vectors).search(queries, Effort(k=10, top_m=64))
    assert recall(rows, nearest(vectors, queries, 10)) >= 0.98


@pytest.mark.parametrize(
    ("load_data", "floor"),
    [
        (partial(bundled.digits, 200), 0.99),
        (partial(bundled.patches, 20_000, 200), 0.97),
        (partial(drawn.overlapping, 20_000, 200), 0.93),
    ],
    ids=["digits", "photographs", "overlapping"],
)
def test_index_reaches_recall_floor_on_bundled_data(
    load_data: Callable[[], tuple[np.ndarray, np.ndarray]], floor: float
) -> None:
    """Degree 32 and a list of 64: 1 797 digits, 8 x 8 pixels of photographs, the benchmark's."""
    vectors, queries = load_data()
    rows, _ = Index.build(vectors, degree=32).search(queries, Effort(k=10, top_m=64))
    assert drawn.recall(rows, drawn.truth(vectors, queries, 10)) >= floor


def test_index_finds_rows_of_both_components() -> None:
    """Two clouds have no edge between them: rows of both are found, whichever is asked for."""
    clouds = [gaussian(2_000, 12), 100 + gaussian(2_000, 12, seed=1)]
    vectors = np.concatenate(clouds)
    index = Index.build(vectors, degree=16)
    assert len(np.unique(build.components(index.graph))) == 2
    queries = np.concatenate([gaussian(50, 12, seed=2), 100 + gaussian(50, 12, seed=3)])
    rows, _ = index.search(queries, Effort(k=10, top_m=64))
    assert recall(rows, nearest(vectors, queries, 10)) >= 0.99
    between = np.full((1, 12), 50.0, np.float32)
    rows, _ = index.search(between, Effort(k=10, top_m=64))
    assert recall(rows, nearest(vectors, between, 10)) >= 0.9


def lost_share(index: Index) -> float:
    """Of all live rows, those that searches for their vectors do not find."""
    view = index.view()
    live = view.live_rows()
    rows = index.neighbours(replace(view, is_walked=True, plans={}), view.vectors[live], USUAL)
    return float((rows[:, 0] != live).mean())


def test_grown_index_finds_isolated_rows() -> None:
    """New edges could push out the only one that led to a row: 0.036 of 20 000 were lost."""
    vectors = gaussian(12_000, 64)
    index = Index(64)
    for first in range(0, 8_000, 500):
        index.upsert(range(first, first + 500), vectors[first : first + 500])
        while index.loose:
            index.link()
    assert lost_share(index) <= 0.003
    index.delete(range(0, 8_000, 2))
    changed = range(1, 2_400, 2)
    for first in range(0, len(changed), 300):
        some = changed[first : first + 300]
        index.upsert(some, vectors[8_000 + first : 8_300 + first])
        while index.loose:
            index.link()
    assert lost_share(index) <= 0.003


@pytest.mark.parametrize("metric", Metric)
@pytest.mark.parametrize("times", [1, 3])
def test_relinking_restores_edges_to_lost_rows(metric: Metric, times: int) -> None:
    """Duplicates are found again too, though no edge may lead to them."""
    vectors = np.repeat(gaussian(2_000, 64), times, axis=0)
    index = Index.build(vectors, metric=metric)
    assert not index.relink_lost(), "where little is missed nothing is done"
    lose(index, share=0.05)
    version, chain = index.links.newest.versions[0], index.view().chain
    index.delete(range(100))
    batches = 1
    while index.relink_lost(250):
        batches += 1
    assert batches == len(vectors) / 250
    assert index.audit is not None and index.audit.missed_share <= 0.005
    newest = index.links.newest.versions[0]
    differ = np.flatnonzero((newest.array != version.array).any(1))
    assert 0 < len(differ) < len(vectors)
    nodes = duplicates.nodes(chain, len(vectors))
    assert np.isin(newest.array[nodes], nodes).all()
    assert not index.relink_lost(), "once behind each audit"


def test_grown_index_keeps_recall_and_entry_points_of_built_one() -> None:
    """Early rows kept long edges, and growth made 1 258 entry points where a build has 198."""
    vectors, queries = overlapping(10_000, 300, dim=64)
    built_index, grown_index = (
        Index.build(vectors, degree=16),
        Index.build(vectors[:1_500], degree=16),
    )
    for first in range(1_500, len(vectors), 250):
        grown_index.upsert(range(first, first + 250), vectors[first : first + 250])
        while grown_index.link():
            pass
    expected = nearest(vectors, queries, 10)
    for top_m in (16, 32, 64):
        shares = [
            recall(index.search(queries, Effort(k=10, top_m=top_m))[0], expected)
            for index in (grown_index, built_index)
        ]
        assert shares[0] >= shares[1] - 0.025
    assert len(grown_index.entries) <= 1.5 * len(built_index.entries)
