"""Bulk searches on a device find what cores find, to the last bit."""

import numpy as np
import pytest

from tests.workers.vector.cuda.batch_searches import SIZES
from tests.workers.vector.data import gaussian, nearest, overlapping
from workers.vector.cuda import feeds
from workers.vector.cuda.batch import DeviceBatch
from workers.vector.cuda.device import Device
from workers.vector.filters.filters import EqualFilter
from workers.vector.index import bulk, inputs
from workers.vector.index.index import Index
from workers.vector.index.query import Effort
from workers.vector.index.view import IndexView
from workers.vector.kernels.metrics import Metric, Storage


@pytest.mark.parametrize("storage", list(Storage))
@pytest.mark.parametrize("metric", list(Metric))
def test_device_distances_equal_cpu(device: Device, metric: Metric, storage: Storage) -> None:
    for dim in (3, 64, 100, 200):
        index = Index.build(gaussian(90, dim), metric=metric, storage=storage)
        view = index.view()
        queries = inputs.prepare(gaussian(4, dim, seed=1), dim, metric)
        cpu = bulk.search_all(Effort(k=90), queries, view)
        gpu = feeds.search_all(DeviceBatch(device, SIZES), Effort(k=90), queries, view)
        assert cpu.rows.tobytes() == gpu.rows.tobytes()
        assert cpu.distances.tobytes() == gpu.distances.tobytes()


@pytest.mark.parametrize("metric", list(Metric))
def test_cpu_prefilter_codes_do_not_change_results(device: Device, metric: Metric) -> None:
    view = Index.build(overlapping(1_500, 0, 96)[0], metric=metric, degree=16).view()
    assert view.codes is not None
    queries = inputs.prepare(gaussian(8, 96, seed=4), 96, metric)
    effort = Effort(k=10, top_m=40, width=2)
    cpu = bulk.search_all(effort, queries, view)
    gpu = feeds.search_all(DeviceBatch(device, SIZES), effort, queries, view)
    assert cpu.rows.tobytes() == gpu.rows.tobytes()
    assert cpu.distances.tobytes() == gpu.distances.tobytes()
    assert cpu.extends == gpu.extends


def test_device_orders_ties_by_row(device: Device) -> None:
    vectors = np.repeat(np.round(gaussian(4, 6) * 4), 300, axis=0)
    view = Index.build(vectors).view()
    queries = inputs.prepare(vectors[[0, 600]], 6, view.metric)
    hits = feeds.search_all(DeviceBatch(device, SIZES), Effort(k=20, top_m=64), queries, view)
    assert hits.rows.tolist() == [list(range(20)), list(range(600, 620))]
    truth = ((vectors[hits.rows] - vectors[[0, 600]][:, None]) ** 2).sum(2)
    assert hits.distances.tobytes() == truth.astype(np.float32).tobytes()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 31, 33, 127])
def test_device_searches_small_index_exactly(device: Device, rows: int) -> None:
    vectors, queries = gaussian(rows, 17), gaussian(5, 17, seed=1)
    view = Index.build(vectors).view()
    prepared = inputs.prepare(queries, 17, view.metric)
    hits = feeds.search_all(DeviceBatch(device, SIZES), Effort(k=10), prepared, view)
    hits_count = min(rows, 10)
    assert hits.rows[:, :hits_count].tolist() == nearest(vectors, queries, 10).tolist()
    assert (hits.rows[:, hits_count:] == -1).all()


def test_device_walk_with_full_visited_table_matches_cpu(device: Device) -> None:
    """Rows beyond half of the visited table are not stored: they recur and are dropped."""
    index = Index.build(gaussian(3_000, 24), degree=120)
    queries = inputs.prepare(gaussian(3, 24, seed=3), 24, index.metric)
    effort = Effort(k=5, top_m=21, width=2)
    hits = feeds.search_all(DeviceBatch(device, SIZES), effort, queries, index.view())
    assert hits.computed / len(queries) > 1_024
    cpu = bulk.search_all(effort, queries, index.view())
    assert hits.rows.tobytes() == cpu.rows.tobytes()


@pytest.mark.parametrize("chunk", [7, 100])
def test_device_slots_continue_with_next_feed(
    device: Device, view: IndexView, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A feed may have fewer queries than there are slots."""
    monkeypatch.setattr(feeds, "_CHUNK_QUERIES", chunk)
    queries, effort = inputs.prepare(gaussian(150, 20, seed=5), 20, view.metric), Effort(k=7)
    cpu = bulk.search_all(effort, queries, view, threads=1)
    batch = DeviceBatch(device, SIZES)
    for _ in range(2):
        gpu = feeds.search_all(batch, effort, queries, view)
        assert gpu.rows.tobytes() == cpu.rows.tobytes()
        assert gpu.distances.tobytes() == cpu.distances.tobytes()
        assert gpu.extends == cpu.extends and not batch.turns_in_flight


def test_device_bulk_search_equals_cpu(device: Device, view: IndexView) -> None:
    queries = inputs.prepare(gaussian(40, 20, seed=5), 20, view.metric)
    for effort in (Effort(k=7, top_m=32), Effort(k=40, top_m=20, where=~EqualFilter("part", 3))):
        cpu = bulk.search_all(effort, queries, view, threads=1)
        gpu = feeds.search_all(DeviceBatch(device, SIZES), effort, queries, view)
        assert gpu.rows.tobytes() == cpu.rows.tobytes()
        assert gpu.distances.tobytes() == cpu.distances.tobytes()


def test_device_finds_duplicates_like_cpu(device: Device) -> None:
    """Duplicates are of deleted nodes, behind filters, and more of one vector than tasks."""
    distinct = gaussian(700, 20)
    of = np.random.default_rng(0).integers(0, 700, 4_000)
    of[:900] = np.arange(900) % 3
    metadata = [{"part": i % 5} for i in range(4_000)]
    index = Index.build(distinct[of[:3_500]], metadata=metadata[:3_500], degree=16)
    index.upsert(range(3_500, 4_000), distinct[of[3_500:]], metadata[3_500:])
    index.link(batch=400)
    index.delete(range(0, 4_000, 7))
    view = index.view()
    queries = inputs.prepare(distinct[:20] + gaussian(20, 20, seed=1) / 20, 20, index.metric)
    batch = DeviceBatch(device, SIZES)
    for effort in (
        Effort(k=10, top_m=20),
        Effort(k=90, top_m=96, width=3),
        Effort(k=5, top_m=16, where=~EqualFilter("part", 3)),
    ):
        cpu = bulk.search_all(effort, queries, view)
        gpu = feeds.search_all(batch, effort, queries, view)
        assert gpu.rows.tobytes() == cpu.rows.tobytes()
        assert gpu.distances.tobytes() == cpu.distances.tobytes()
        assert len(np.unique(of[cpu.rows[0]])) < effort.k, "several of one vector"
