"""Distances in panels are those of single rows, to the bit, and the nearest are the nearest."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.vector.data import gaussian
from workers.vector.kernels.arrays import aligned
from workers.vector.kernels.distances import distance, padded_dim
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.keys import EMPTY, key_of
from workers.vector.kernels.memory import address
from workers.vector.kernels.metrics import INNER_PRODUCT, SINGLE, SQUARED_L2
from workers.vector.kernels.panels import (
    NEAREST_MAX,
    PANEL_DIM_MAX,
    PANEL_ROWS,
    choose,
    measure,
    pad_to_panel,
    panels,
)

Array = np.ndarray[Any, Any]

FAR = [-np.inf, -2.5, -1.0, -0.0, 0.0, 1e-9, 1.0, 3.5, np.inf]


@kernel
def _measured(panel_array: Array, query: Array, metric: int) -> Array:
    out = np.empty((panel_array.shape[0], PANEL_ROWS), np.float32)
    measure(
        address(panel_array),
        len(panel_array),
        address(query),
        panel_array.shape[1],
        metric,
        address(out),
    )
    return out


@kernel
def _one_by_one(vectors: Array, query: Array, metric: int) -> Array:
    out = np.empty(len(vectors), np.float32)
    for row in range(len(vectors)):
        at = address(vectors) + row * vectors.strides[0]
        out[row] = distance(at, address(query), vectors.shape[1], metric, SINGLE)
    return out


@kernel
def _chosen(far: Array, rows: Array, keys: Array) -> None:
    choose(address(far), len(rows), address(rows), address(keys), len(keys))


@kernel
def _keys(far: Array, rows: Array) -> Array:
    out = np.empty(len(rows), np.uint64)
    for i in range(len(rows)):
        out[i] = key_of(far[i], rows[i])
    return out


def stored(rows: int, dim: int, seed: int) -> Array:
    out = aligned(rows, padded_dim(dim), np.float32)
    out[:] = 0
    out[:, :dim] = gaussian(rows, dim, seed=seed)
    return out


@pytest.mark.parametrize("metric", [SQUARED_L2, INNER_PRODUCT])
@pytest.mark.parametrize("dim", [1, 7, 8, 9, 16, 17, 24, 25, 31, 40, 48, 49, 56, 57, 63, 64])
def test_panel_distances_equal_single_row_distances(dim: int, metric: int) -> None:
    vectors, queries = stored(37, dim, 1), stored(3, dim, 2)
    vectors[5] = queries[0]
    vectors[6] = 0
    panel_array = panels(vectors, dim)
    assert panel_array.shape[2] == PANEL_ROWS and dim <= panel_array.shape[1] <= PANEL_DIM_MAX
    for query in queries:
        distances = _measured(panel_array, query, metric).ravel()[:37]
        assert distances.tobytes() == _one_by_one(vectors, query, metric).tobytes()


@given(
    st.lists(st.sampled_from(FAR), max_size=70),
    st.integers(1, NEAREST_MAX), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_choose_takes_nearest_by_distance_then_row(
    values: list[float], room: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows = pad_to_panel(random.permutation(2**31 - 1 - np.arange(len(values))))
    far = np.zeros(-(-len(values) // PANEL_ROWS) * PANEL_ROWS, np.float32)
    far[: len(values)] = values
    keys = np.full(room, EMPTY, np.uint64)
    half = len(values) // (2 * PANEL_ROWS) * PANEL_ROWS  # what is chosen in two steps
    _chosen(far[:half], rows[:half], keys)
    _chosen(far[half:], rows[half:], keys)
    expected = np.sort(_keys(far, rows))[:room]
    assert keys[: len(expected)].tolist() == expected.tolist()
    assert (keys[len(expected) :] == EMPTY).all()


def test_pad_to_panel_reserves_memory_for_whole_panel() -> None:
    for count in (1, 16, 17):
        rows = pad_to_panel(np.arange(count) + 3)
        assert rows.tolist() == list(range(3, 3 + count))
        assert rows.base is not None and len(rows.base) % PANEL_ROWS == 0
