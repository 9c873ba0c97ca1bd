"""The CUDA kernels find what the CPU's find, to the last bit, in any company.

They run as they are, on a real device where there is one and always in an emulator, which also runs
a block's threads in many orders.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.workers.vector.cuda.batch_searches import (
    EFFORTS,
    SIZES,
    assign,
    run,
    searches,
    slot_result,
)
from tests.workers.vector.cuda.emulator import EmulatedDevice
from tests.workers.vector.data import clustered_index, gaussian, nearest
from tests.workers.vector.traversal.reference import Reference
from workers.vector.cuda import feeds
from workers.vector.cuda.batch import DeviceBatch
from workers.vector.cuda.device import Device
from workers.vector.cuda.rings import DEPTH
from workers.vector.index import bulk, inputs, plans
from workers.vector.index import view as views
from workers.vector.index.query import Effort
from workers.vector.index.view import IndexView
from workers.vector.kernels.metrics import Metric

Array = np.ndarray[Any, Any]


@pytest.mark.parametrize("effort", EFFORTS, ids=repr)
@pytest.mark.parametrize("scanned_max", [0, 10_000])
def test_batch_search_matches_cpu_and_reference(
    device: Device, view: IndexView, effort: Effort, scanned_max: int
) -> None:
    cases = searches(view, effort, scanned_rows_max=scanned_max)
    for search, (rows, distances, counts) in zip(cases, run(DeviceBatch(device, SIZES), cases),
                                                 strict=True):  # fmt: skip
        expected = Reference(search).run()
        assert (rows, distances) == (expected[0].tobytes(), expected[1].tobytes())
        if search.plan.exact or expected[0][min(effort.k, search.plan.allowed) - 1] >= 0:
            same = bulk.search_all(effort, search.query, view, scanned_rows_max=scanned_max)
            assert rows == same.rows.tobytes()
            assert counts[0] == same.extends


def test_device_rescans_after_failed_walks_like_cpu(device: Device) -> None:
    """Deleted neighbours leave the first query chance hits: these go, and rows are scanned."""
    index = clustered_index()
    queries = inputs.prepare(gaussian(6, 20, seed=2), 20, Metric.SQEUCLIDEAN)
    index.delete(nearest(index.view().vectors[:, :20], queries[:1, :20], 500)[0].tolist())
    view, effort = index.view(), Effort(k=10, top_m=32)
    prepared = searches(view, effort, scanned_rows_max=0)
    results = run(DeviceBatch(device, SIZES), prepared)
    for search, (rows, distances, _) in zip(prepared, results, strict=True):
        expected = Reference(search).run()
        assert (rows, distances) == (expected[0].tobytes(), expected[1].tobytes())
    assert (np.frombuffer(results[0][0], np.int64) == -1).all()
    cpu = bulk.search_all(effort, queries, view, scanned_rows_max=0)
    gpu = feeds.search_all(DeviceBatch(device, SIZES), effort, queries, view, scanned_rows_max=0)
    exact = bulk.search_all(effort, queries[:1], view, scanned_rows_max=view.count)
    assert cpu.rows.tobytes() == gpu.rows.tobytes()
    assert cpu.rows[0].tobytes() == exact.rows[0].tobytes()


@pytest.mark.parametrize("order", [1, 2, 17, 12_345, 99_999])
def test_thread_order_does_not_change_batch_results(order: int, view: IndexView) -> None:
    for effort in (EFFORTS[1], EFFORTS[5]):
        prepared = searches(view, effort)
        plain_device, shuffled_device = EmulatedDevice(), EmulatedDevice(order)
        sizes = replace(SIZES, threads=64)
        assert run(DeviceBatch(shuffled_device, sizes), prepared) == run(
            DeviceBatch(plain_device, SIZES), prepared
        )
        shuffled_device.check()


@pytest.mark.parametrize("seed", range(4))
def test_batch_result_does_not_depend_on_concurrent_searches(
    device: Device, view: IndexView, seed: int
) -> None:
    """Searches arrive, park, resume and are given up at random while turns are in flight."""
    random = np.random.default_rng(seed)
    batch, free = DeviceBatch(device, SIZES), list(range(SIZES.slots))
    in_flight: dict[int, Any] = {}
    pending = [
        (number, search)
        for number, search in enumerate(
            search
            for effort in EFFORTS
            for search in searches(view, effort, 4, scanned_rows_max=0, seeds=(3, 8, 40))
        )
    ]
    alone = {n: run(DeviceBatch(device, SIZES), [search])[0] for n, search in pending}
    while pending or in_flight:
        while pending and free and random.random() < 0.7:
            number, search = pending.pop(int(random.integers(len(pending))))
            slot = free.pop()
            assign(batch, slot, search)
            in_flight[slot] = (number, search)
        if in_flight and random.random() < 0.05:
            slot = int(random.choice(list(in_flight)))
            batch.give_up(slot)
            pending.append(in_flight.pop(slot))
            while batch.turns_in_flight:  # what it points to would go now
                finish(batch, in_flight, free, alone)
            free.append(slot)
        active = [slot for slot in in_flight if random.random() < 0.8][: batch.places]
        batch.launch(active, int(random.integers(1, 8)))
        if batch.turns_in_flight == DEPTH or random.random() < 0.3:
            finish(batch, in_flight, free, alone)
    while batch.turns_in_flight:
        finish(batch, in_flight, free, alone)
    assert sorted(free) == list(range(SIZES.slots))


def finish(
    batch: DeviceBatch, in_flight: dict[int, Any], free: list[int], alone: dict[int, Any]
) -> None:
    for slot in batch.collect():
        number, search = in_flight.pop(slot)
        assert slot_result(batch, slot, search) == alone[number]
        free.append(slot)


def test_batch_settings_reject_wrong_sizes() -> None:
    for wrong, message in (
        ({"merge_max": 100}, "cuda.merge_max: expected a power of two"),
        ({"sizes": (8, 2)}, "cuda.sizes: expected ascending numbers"),
        ({"threads": 48}, "expected threads in whole warps"),
        ({"sizes": (64,)}, "expected sizes up to slots"),
    ):
        with pytest.raises(Exception, match=message):
            replace(SIZES, **wrong)


def test_batch_scans_few_nodes_like_cpu(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "NODES_MAX", 2_000)
    monkeypatch.setattr(plans, "_NODES_PER_ENTRY", 2_000)  # by the shortest lists, too
    index = clustered_index(1_500)
    index.delete(range(0, 1_500, 7))
    index.upsert(range(5_000, 5_100), gaussian(100, 20), [{"part": 3}] * 100)
    view = index.view()
    assert view.nodes is not None
    for effort in EFFORTS:
        prepared = searches(view, effort)
        results = run(DeviceBatch(device, SIZES), prepared)
        for search, (rows, distances, counts) in zip(prepared, results, strict=True):
            expected = Reference(search).run()
            assert (rows, distances) == (expected[0].tobytes(), expected[1].tobytes())
            same = bulk.search_all(effort, search.query, view)
            assert search.plan.exact and rows == same.rows.tobytes()
            assert counts[0] == same.extends
