"""The CUDA kernels find what the CPU's find, to the last bit, in any company.

They run as they are, on a real device where there is one and always in an emulator, which also runs
a block's threads in many orders.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.workers.search.cuda.emulator import EmulatedDevice
from tests.workers.search.cuda.running import EFFORTS, SIZES, assign, left, run, searches
from tests.workers.search.data import clustered_index, gaussian, nearest
from tests.workers.search.walk.reference import Reference
from workers.search.cuda import feeds
from workers.search.cuda.batch import DeviceBatch
from workers.search.cuda.device import Device
from workers.search.cuda.rings import DEPTH
from workers.search.index import bulk, inputs, plans
from workers.search.index import view as views
from workers.search.index.query import Effort
from workers.search.index.view import IndexView
from workers.search.kernels.metrics import Metric

Array = np.ndarray[Any, Any]


@pytest.mark.parametrize("effort", EFFORTS, ids=repr)
@pytest.mark.parametrize("scanned_max", [0, 10_000])
def test_searches_equal_the_cpus_and_the_reference(
    device: Device, view: IndexView, effort: Effort, scanned_max: int
) -> None:
    wanted = searches(view, effort, scanned_rows_max=scanned_max)
    for search, (rows, distances, counts) in zip(wanted, run(DeviceBatch(device, SIZES), wanted),
                                                 strict=True):  # fmt: skip
        expected = Reference(search).run()
        assert (rows, distances) == (expected[0].tobytes(), expected[1].tobytes())
        if search.plan.exact or expected[0][min(effort.k, search.plan.allowed) - 1] >= 0:
            same = bulk.search_all(effort, search.query, view, scanned_rows_max=scanned_max)
            assert rows == same.rows.tobytes()
            assert counts[0] == same.extends


def test_walks_in_vain_are_told_alike(device: Device) -> None:
    """What is near the first query is deleted, so that its hits are a matter of chance: they are
    dropped, and the rest is scanned."""
    index = clustered_index()
    queries = inputs.prepare(gaussian(6, 20, seed=2), 20, Metric.SQEUCLIDEAN)
    index.delete(nearest(index.view().vectors[:, :20], queries[:1, :20], 500)[0].tolist())
    view, effort = index.view(), Effort(k=10, top_m=32)
    wanted = searches(view, effort, scanned_rows_max=0)
    found = run(DeviceBatch(device, SIZES), wanted)
    for search, (rows, distances, _) in zip(wanted, found, strict=True):
        expected = Reference(search).run()
        assert (rows, distances) == (expected[0].tobytes(), expected[1].tobytes())
    assert (np.frombuffer(found[0][0], np.int64) == -1).all()
    cpu = bulk.search_all(effort, queries, view, scanned_rows_max=0)
    gpu = feeds.search_all(DeviceBatch(device, SIZES), effort, queries, view, scanned_rows_max=0)
    exact = bulk.search_all(effort, queries[:1], view, scanned_rows_max=view.count)
    assert cpu.rows.tobytes() == gpu.rows.tobytes()
    assert cpu.rows[0].tobytes() == exact.rows[0].tobytes()


@pytest.mark.parametrize("order", [1, 2, 17, 12_345, 99_999])
def test_no_order_of_threads_or_blocks_changes_anything(order: int, view: IndexView) -> None:
    for effort in (EFFORTS[1], EFFORTS[5]):
        wanted = searches(view, effort)
        plain, other = EmulatedDevice(), EmulatedDevice(order)
        sizes = replace(SIZES, threads=64)
        assert run(DeviceBatch(other, sizes), wanted) == run(DeviceBatch(plain, SIZES), wanted)
        other.check()


@pytest.mark.parametrize("seed", range(4))
def test_a_result_does_not_depend_on_what_runs_beside_it(
    device: Device, view: IndexView, seed: int
) -> None:
    """Random arrivals, parks, resumes, gives-up and turns under way."""
    random = np.random.default_rng(seed)
    batch, free = DeviceBatch(device, SIZES), list(range(SIZES.slots))
    held: dict[int, Any] = {}
    wanted = [
        (number, search)
        for number, search in enumerate(
            search
            for effort in EFFORTS
            for search in searches(view, effort, 4, scanned_rows_max=0, seeds=(3, 8, 40))
        )
    ]
    alone = {n: run(DeviceBatch(device, SIZES), [search])[0] for n, search in wanted}
    while wanted or held:
        while wanted and free and random.random() < 0.7:
            number, search = wanted.pop(int(random.integers(len(wanted))))
            slot = free.pop()
            assign(batch, slot, search)
            held[slot] = (number, search)
        if held and random.random() < 0.05:
            slot = int(random.choice(list(held)))
            batch.give_up(slot)
            wanted.append(held.pop(slot))
            while batch.turns_in_flight:  # what it points to would go now
                finish(batch, held, free, alone)
            free.append(slot)
        active = [slot for slot in held if random.random() < 0.8][: batch.places]
        batch.launch(active, int(random.integers(1, 8)))
        if batch.turns_in_flight == DEPTH or random.random() < 0.3:
            finish(batch, held, free, alone)
    while batch.turns_in_flight:
        finish(batch, held, free, alone)
    assert sorted(free) == list(range(SIZES.slots))


def finish(
    batch: DeviceBatch, held: dict[int, Any], free: list[int], alone: dict[int, Any]
) -> None:
    for slot in batch.collect():
        number, search = held.pop(slot)
        assert left(batch, slot, search) == alone[number]
        free.append(slot)


def test_sizes_are_checked() -> None:
    for wrong, message in (
        ({"merge_max": 100}, "cuda.merge_max: expected a power of two"),
        ({"sizes": (8, 2)}, "cuda.sizes: expected ascending numbers"),
        ({"threads": 48}, "expected threads in whole warps"),
        ({"sizes": (64,)}, "expected sizes up to slots"),
    ):
        with pytest.raises(Exception, match=message):
            replace(SIZES, **wrong)


def test_few_nodes_are_all_measured_alike(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "NODES_MAX", 2_000)
    monkeypatch.setattr(plans, "_NODES_PER_ENTRY", 2_000)  # by the shortest lists, too
    index = clustered_index(1_500)
    index.delete(range(0, 1_500, 7))
    index.upsert(range(5_000, 5_100), gaussian(100, 20), [{"part": 3}] * 100)
    view = index.view()
    assert view.nodes is not None
    for effort in EFFORTS:
        wanted = searches(view, effort)
        found = run(DeviceBatch(device, SIZES), wanted)
        for search, (rows, distances, counts) in zip(wanted, found, strict=True):
            expected = Reference(search).run()
            assert (rows, distances) == (expected[0].tobytes(), expected[1].tobytes())
            same = bulk.search_all(effort, search.query, view)
            assert search.plan.exact and rows == same.rows.tobytes()
            assert counts[0] == same.extends
