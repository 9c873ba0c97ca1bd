"""A search's result does not depend on what runs beside it, and is right where it must be."""

from typing import Any

import numpy as np
import pytest

from workers.search import entry, graph, knn, steps
from workers.search.distances import SINGLE, SQUARED_L2, padded
from workers.search.keys import EMPTY, rows_and_distances
from workers.search.slots import Field, Slots, Status, hash_places

Array = np.ndarray[Any, Any]
K, TOP_M = 5, 32


class Data:
    """A small index and its queries."""

    def __init__(self, rows: int, dim: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.vectors = np.zeros((rows, padded(dim)), np.float32)
        self.vectors[:, :dim] = random.standard_normal((rows, dim))
        self.queries = np.zeros((20, padded(dim)), np.float32)
        self.queries[:, :dim] = random.standard_normal((20, dim))
        keys = knn.neighbours(self.vectors, 12, SQUARED_L2, SINGLE)
        self.graph = graph.optimised(keys, 8)
        self.entries = entry.representatives(self.vectors, self.graph, SQUARED_L2, SINGLE)

    def admit(self, slots: Slots, slot: int, query: int, *, width: int = 1) -> None:
        slots.queries[slot] = self.queries[query]
        slots.top[slot], slots.found[slot] = EMPTY, EMPTY
        slots.visited[slot] = 0xFFFFFFFF
        values = {
            Field.STATUS: Status.SEEDING,
            Field.TOP_M: TOP_M,
            Field.WIDTH: width,
            Field.K: K,
            Field.ENTRIES: 4,
            Field.HASH_MASK: hash_places(TOP_M) - 1,
            Field.VECTORS: self.vectors.ctypes.data,
            Field.ROW_BYTES: self.vectors.strides[0],
            Field.LENGTH: self.vectors.shape[1],
            Field.GRAPH: self.graph.ctypes.data,
            Field.DEGREE: self.graph.shape[1],
            Field.REPS: self.entries.ctypes.data,
            Field.REPS_COUNT: len(self.entries),
        }
        slots.fields[slot] = 0
        for field, value in values.items():
            slots.fields[slot, field] = value

    def search(self, slot_count: int, extends_max: int, width: int = 1) -> list[Array]:
        """The top lists of all queries, run on so many slots."""
        slots = Slots(slot_count, length_max=self.vectors.shape[1], top_m_max=TOP_M, k_max=K)
        tasks, results = np.empty(slot_count * 256, np.int64), np.empty(slot_count * 256, "f4")
        spans, finished = np.zeros((slot_count, 3), np.int64), np.empty(slot_count, np.int64)
        attention = np.zeros(1, np.int64)
        found: dict[int, Array] = {}
        waiting, running = list(range(len(self.queries)))[::-1], dict[int, int]()
        while waiting or running:
            for slot in set(range(slot_count)) - set(running):
                if waiting:
                    running[slot] = waiting.pop()
                    self.admit(slots, slot, running[slot], width=width)
            count = steps.advance(
                slots.fields, slots.queries, slots.top, slots.found, slots.visited,
                np.array(sorted(running)), tasks, results, spans, finished, extends_max, attention,
            )  # fmt: skip
            for slot in finished[:count].tolist():
                found[running.pop(slot)] = slots.top[slot].copy()
        return [found[query] for query in range(len(self.queries))]


@pytest.fixture(scope="module")
def data() -> Data:
    return Data(500, 24)


@pytest.mark.parametrize("slot_count", [2, 7, 20])
@pytest.mark.parametrize("extends_max", [1, 3, 1_000])
def test_results_do_not_depend_on_batch_mates(
    data: Data, slot_count: int, extends_max: int
) -> None:
    alone = data.search(1, 1_000)
    together = data.search(slot_count, extends_max)
    assert all((a == b).all() for a, b in zip(alone, together, strict=True))


def test_most_true_neighbours_are_found(data: Data) -> None:
    scores = ((data.queries[:, None, :] - data.vectors[None]) ** 2).sum(2)
    truth = np.argsort(scores, axis=1)[:, :K]
    for width in (1, 4):
        found = [rows_and_distances(top)[0][:K] for top in data.search(4, 100, width)]
        hits = sum(len(set(a) & set(b)) for a, b in zip(found, truth, strict=True))
        assert hits >= 0.9 * truth.size


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 31])
def test_small_indexes_are_searched_exactly(rows: int) -> None:
    small = Data(rows, 3)
    for query, top in zip(small.queries, small.search(3, 2), strict=True):
        found, distances = rows_and_distances(top)
        expected = ((small.vectors - query) ** 2).sum(1)
        order = np.argsort(expected, kind="stable")
        assert found[:rows].tolist() == order.tolist()
        assert np.allclose(distances[:rows], expected[order], rtol=1e-5)
        assert (found[rows:] == -1).all()
