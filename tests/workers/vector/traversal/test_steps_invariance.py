"""The headline: a search's result is the same to the last byte whatever runs beside it.

A state machine admits searches of all kinds to the slots of one kernel, advances random subsets of
them (the rest is parked), and compares each that ends with the same search alone.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.workers.vector.data import clustered_index, gaussian
from workers.vector.filters.filters import EqualFilter, OneOfFilter
from workers.vector.index import bulk, inputs, plans
from workers.vector.index.query import Effort
from workers.vector.index.view import IndexView
from workers.vector.kernels.metrics import Metric
from workers.vector.traversal import fields, steps
from workers.vector.traversal.slots import CpuSlots

Array = np.ndarray[Any, Any]

TOP_M_MAX, K_MAX = 96, 40
DIMS = (20, 72)  # the longer ones have codes
QUERIES = {dim: inputs.prepare(gaussian(12, dim, seed=4), dim, Metric.SQEUCLIDEAN) for dim in DIMS}
QUERY_COUNT = 12
EFFORTS = st.builds(
    Effort,
    k=st.sampled_from([1, 5, 40]),
    top_m=st.sampled_from([8, 32, 64]),
    width=st.sampled_from([1, 2, 5]),
    patience=st.sampled_from([0, 0, 2]),
    where=st.sampled_from([None, None, EqualFilter("part", 3), ~OneOfFilter("part", [0, 1])]),
)


@cache
def views() -> tuple[IndexView, ...]:
    """Snapshots as an index changes: linked, with loose rows, with deleted ones, mended."""
    snapshots = []
    for dim in DIMS:
        index = clustered_index(1_700, dim)
        snapshots.append(index.view())
        index.upsert(range(2_000, 2_100), gaussian(100, dim, seed=9), [{"part": 3}] * 100)
        snapshots.append(index.view())
        index.delete(range(0, 1_500, 5))
        snapshots.append(index.view())
        index.link()
        index.compact()
        snapshots.append(index.view())
        assert (snapshots[-1].codes is not None) is (dim == 72)
    return tuple(snapshots)


@dataclass(frozen=True, slots=True)
class SearchCase:
    """What makes a search; equal ones are the same."""

    effort: Effort
    query: int
    view: int
    warm: int  # another query, whose routing list this one begins with; -1: none
    scanned_rows_max: int

    def admitted(self) -> plans.PreparedSearch:
        view = views()[self.view]
        queries = QUERIES[view.dim]
        seeds: Any = ()
        if self.warm >= 0:
            rows = bulk.search_all(Effort(k=16, top_m=16), queries[[self.warm]], view, threads=1)
            seeds = rows.rows[0]
        return plans.search_of(
            self.effort, queries[[self.query]], view, seeds=seeds, top_m_max=TOP_M_MAX,
            scanned_rows_max=self.scanned_rows_max,
        )  # fmt: skip


class Batch:
    """Slots and what is in them."""

    def __init__(self, count: int) -> None:
        self.slots = CpuSlots(count, top_m_max=TOP_M_MAX, k_max=K_MAX)
        self.searches_by_slot: dict[int, tuple[SearchCase, plans.PreparedSearch]] = {}

    def admit(self, case: SearchCase) -> None:
        slot = min(set(range(self.slots.count)) - set(self.searches_by_slot))
        search = case.admitted()
        self.slots.fields[slot] = search.row
        self.searches_by_slot[slot] = (case, search)

    def advance(self, active: list[int], extends: int) -> list[tuple[SearchCase, bytes]]:
        """The searches that ended, and all that they left behind."""
        slots, finished = self.slots, np.empty(self.slots.count, np.int64)
        ended_count, _ = steps.advance(
            slots.fields, slots.top, slots.hit_keys, slots.visited, np.array(active), len(active),
            slots.tasks, finished, extends, slots.attention,
        )  # fmt: skip
        out = []
        for slot in finished[:ended_count].tolist():
            case, search = self.searches_by_slot[slot]
            if plans.restart_as_scan(search, slots, slot):
                continue
            del self.searches_by_slot[slot]
            row = slots.fields[slot]
            arrays = [
                plans.keys_of(slots, slot), slots.top[slot, : row[fields.TOP_M]],
                row[[fields.EXTENDS, fields.DISTANCES]],
            ]  # fmt: skip
            out.append((case, b"".join(array.tobytes() for array in arrays)))
        return out


@cache
def alone(case: SearchCase) -> bytes:
    """What the search leaves behind where nothing runs beside it."""
    batch = Batch(1)
    batch.admit(case)
    while True:
        for _, outcome in batch.advance([0], 1_000_000):
            return outcome


class BatchMates(RuleBasedStateMachine):
    """Searches in any company."""

    @initialize(count=st.sampled_from([1, 2, 7, 8, 64]))
    def start(self, count: int) -> None:
        self.batch = Batch(count)

    @rule(
        effort=EFFORTS,
        query=st.integers(0, QUERY_COUNT - 1),
        view=st.integers(0, 7),
        warm=st.sampled_from([-1, -1, 0, 7]),
        scanned_rows_max=st.sampled_from([0, 0, 0, 10_000]),
        copies=st.integers(1, 5),
    )
    def arrive(self, copies: int, **case_fields: Any) -> None:
        for i in range(copies):
            if len(self.batch.searches_by_slot) < self.batch.slots.count:
                query = (case_fields["query"] + i) % QUERY_COUNT
                self.batch.admit(SearchCase(**{**case_fields, "query": query}))

    @rule(data=st.data(), extends=st.sampled_from([1, 2, 7, 50]))
    def advance(self, data: st.DataObject, extends: int) -> None:
        if self.batch.searches_by_slot:
            slots = sorted(self.batch.searches_by_slot)
            active = data.draw(st.lists(st.sampled_from(slots), min_size=1, unique=True))
            self.check(self.batch.advance(active, extends))

    @invariant()
    def searches_fit_in_slots(self) -> None:
        if hasattr(self, "batch"):
            assert len(self.batch.searches_by_slot) <= self.batch.slots.count

    def teardown(self) -> None:
        while hasattr(self, "batch") and self.batch.searches_by_slot:
            self.check(self.batch.advance(sorted(self.batch.searches_by_slot), 13))

    def check(self, outcomes: list[tuple[SearchCase, bytes]]) -> None:
        for case, outcome in outcomes:
            assert outcome == alone(case), case


TestBatchMates = BatchMates.TestCase
TestBatchMates.settings = settings(max_examples=40, stateful_step_count=25)


def test_bulk_search_does_not_depend_on_slots_or_threads() -> None:
    for view in views():
        queries = np.repeat(QUERIES[view.dim], 20, axis=0)
        queries += np.arange(240, dtype=np.float32)[:, None] / 1_000
        effort = Effort(k=7, top_m=32)
        single_slot = bulk.search_all(effort, queries, view, threads=1, slots_per_thread=1)
        for threads, count in ((1, 7), (2, 8), (3, 64)):
            several_slots = bulk.search_all(
                effort, queries, view, threads=threads, slots_per_thread=count
            )
            assert several_slots.rows.tobytes() == single_slot.rows.tobytes()
            assert several_slots.distances.tobytes() == single_slot.distances.tobytes()
            assert (several_slots.extends, several_slots.computed) == (
                single_slot.extends,
                single_slot.computed,
            )
