"""Searches on a device's batch without an engine: how tests begin them, and what they leave."""

from typing import Any

import numpy as np

from tests.workers.vector.data import gaussian
from tests.workers.vector.traversal.reference import hits_of
from workers.vector.cuda.batch import BatchSettings, DeviceBatch
from workers.vector.filters.filters import EqualFilter, OneOfFilter, RangeFilter
from workers.vector.index import inputs, plans
from workers.vector.index.query import Effort
from workers.vector.index.view import IndexView
from workers.vector.traversal import fields
from workers.vector.traversal.slots import ROWS_A_STEP

SIZES = BatchSettings(
    slots=12, sizes=(2, 8), steps=(1, 4), top_m_max=96, k_max=200, dim_max=256, tasks_max=256,
    seed_rows=ROWS_A_STEP, merge_max=64, threads=32,
)  # fmt: skip
EFFORTS = [
    Effort(k=1, top_m=16),
    Effort(k=10, top_m=48, width=3),
    Effort(k=10, top_m=64, width=2, patience=3),
    Effort(k=30, top_m=16),
    Effort(k=5, where=EqualFilter("part", 3)),
    Effort(k=5, top_m=24, where=~OneOfFilter("part", [1, 2, 3])),
    Effort(k=90, where=RangeFilter("part", 3, 3) & EqualFilter("kind", "odd")),
]


def searches(view: IndexView, effort: Effort, count: int = 6, **how: Any) -> list[Any]:
    queries = inputs.prepare(gaussian(count, view.dim, seed=2), view.dim, view.metric)
    return [
        plans.search_of(effort, np.ascontiguousarray(query[None]), view, **how) for query in queries
    ]


def assign(batch: DeviceBatch, slot: int, search: plans.PreparedSearch) -> None:
    warm = np.empty(0, np.int64) if search.warm is None else search.warm
    batch.assign(slot, batch.copies.row(search.row, search), search.query[0], warm)


def slot_result(
    batch: DeviceBatch, slot: int, search: plans.PreparedSearch
) -> tuple[bytes, bytes, list[int]]:
    """Rows, distances and counts that an ended slot left."""
    apart = search.row[fields.SCREENED] or search.row[fields.CHAIN]
    lists = batch.hit_keys if apart else batch.top
    rows, distances = hits_of(lists[slot, : search.plan.k].copy())
    return rows.tobytes(), distances.tobytes(), batch.counts[slot].tolist()


def run(
    batch: DeviceBatch, prepared: list[Any], extends: int = 4
) -> list[tuple[bytes, bytes, list[int]]]:
    """What searches leave that are all begun at once."""
    for slot, search in enumerate(prepared):
        assign(batch, slot, search)
    out, active = {}, list(range(len(prepared)))
    while active:
        batch.launch(active[: batch.places], extends)
        for slot in batch.collect():
            out[slot] = slot_result(batch, slot, prepared[slot])
            active.remove(slot)
    return [out[slot] for slot in range(len(prepared))]
