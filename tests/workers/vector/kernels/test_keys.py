"""Keys: their order is that of (distance, row), kernels and NumPy read the same from them."""

from typing import Any

import numpy as np
import pytest

from workers.vector.kernels.jit import kernel
from workers.vector.kernels.keys import (
    EMPTY,
    FLAG,
    LIMIT,
    distance_of,
    insert,
    key_of,
    row_of,
    rows_and_distances,
)
from workers.vector.kernels.memory import address

EDGES = np.array(
    [-np.inf, -3.4e38, -1.5, -1e-40, -0.0, 0.0, 1e-40, 1.5, 3.4e38, np.inf], np.float32
)


@kernel
def make_keys(distances: Any, rows: Any, keys: Any) -> None:
    for i in range(len(rows)):
        keys[i] = key_of(distances[i], rows[i])


@kernel
def read(keys: Any, rows: Any, distances: Any) -> None:
    for i in range(len(keys)):
        rows[i], distances[i] = row_of(keys[i]), distance_of(keys[i])


@kernel
def inserted(keys: Any, count: int, key: Any) -> int:
    place: int = insert(address(keys), count, key)
    return place


def keys_of(distances: Any, rows: Any) -> Any:
    keys = np.empty(len(rows), np.uint64)
    make_keys(np.asarray(distances, np.float32), np.asarray(rows, np.int64), keys)
    return keys


def test_keys_order_by_distance_then_row() -> None:
    pairs = [(far, row) for far in EDGES.tolist() for row in (0, 1, 2**31 - 2)]
    keys = keys_of([far for far, _ in pairs], [row for _, row in pairs])
    order = sorted(range(len(pairs)), key=lambda i: (pairs[i][0], pairs[i][1]))
    assert np.argsort(keys, kind="stable").tolist() == order
    assert (keys < LIMIT).all() and not (keys & FLAG).any()


def test_kernels_and_numpy_read_same_keys() -> None:
    rows = np.arange(len(EDGES)) * 200_000_000
    keys = keys_of(EDGES, rows)
    kernel_rows, kernel_far = np.empty(len(keys), np.int64), np.empty(len(keys), np.float32)
    read(keys, kernel_rows, kernel_far)
    numpy_rows, numpy_far = rows_and_distances(keys)
    assert kernel_rows.tolist() == numpy_rows.tolist() == rows.tolist()
    assert kernel_far.tobytes() == numpy_far.tobytes() == (EDGES + np.float32(0)).tobytes()


@pytest.mark.parametrize("count", [1, 3, 8, 9, 24])
def test_list_keeps_nearest_keys_once(count: int) -> None:
    random = np.random.default_rng(count)
    keys = keys_of(random.integers(0, 6, 200), random.integers(0, 9, 200))
    room = np.full(count + 2, EMPTY, np.uint64)  # what lies behind a list stays as it is
    for key in keys:
        before = room[:count].copy()
        place = inserted(room, count, key)
        assert (place >= 0) == (not np.array_equal(before, room[:count]))
        assert place < 0 or room[place] == key
    expected = np.full(count, EMPTY, np.uint64)
    nearest = np.unique(keys)[:count]
    expected[: len(nearest)] = nearest
    assert room[:count].tolist() == expected.tolist()
    assert (room[count:] == EMPTY).all()


def test_insert_treats_flagged_key_as_same_row() -> None:
    keys = keys_of([1, 2, 3], [4, 5, 6])
    keys[1] |= FLAG
    assert inserted(keys, 3, keys[1] & ~FLAG) == -1
    assert keys[1] & FLAG
