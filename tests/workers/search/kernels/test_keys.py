"""Keys: their order is that of (distance, row), kernels and NumPy read the same from them."""

from typing import Any

import numpy as np
import pytest

from workers.search.kernels.jit import kernel
from workers.search.kernels.keys import (
    EMPTY,
    FLAG,
    LIMIT,
    distance_of,
    insert,
    key_of,
    row_of,
    rows_and_distances,
)
from workers.search.kernels.memory import address

EDGES = np.array(
    [-np.inf, -3.4e38, -1.5, -1e-40, -0.0, 0.0, 1e-40, 1.5, 3.4e38, np.inf], np.float32
)


@kernel
def made(distances: Any, rows: Any, keys: Any) -> None:
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
    made(np.asarray(distances, np.float32), np.asarray(rows, np.int64), keys)
    return keys


def test_keys_are_ordered_by_distance_and_then_by_row() -> None:
    pairs = [(far, row) for far in EDGES.tolist() for row in (0, 1, 2**31 - 2)]
    keys = keys_of([far for far, _ in pairs], [row for _, row in pairs])
    order = sorted(range(len(pairs)), key=lambda i: (pairs[i][0], pairs[i][1]))
    assert np.argsort(keys, kind="stable").tolist() == order
    assert (keys < LIMIT).all() and not (keys & FLAG).any()


def test_kernels_and_numpy_read_what_was_put_in() -> None:
    rows = np.arange(len(EDGES)) * 200_000_000
    keys = keys_of(EDGES, rows)
    found, far = np.empty(len(keys), np.int64), np.empty(len(keys), np.float32)
    read(keys, found, far)
    again, far_again = rows_and_distances(keys)
    assert found.tolist() == again.tolist() == rows.tolist()
    assert far.tobytes() == far_again.tobytes() == (EDGES + np.float32(0)).tobytes()


@pytest.mark.parametrize("count", [1, 3, 8, 9, 24])
def test_a_list_keeps_the_nearest_once_each(count: int) -> None:
    random = np.random.default_rng(count)
    given = keys_of(random.integers(0, 6, 200), random.integers(0, 9, 200))
    room = np.full(count + 2, EMPTY, np.uint64)  # what lies behind a list stays as it is
    for key in given:
        before = room[:count].copy()
        place = inserted(room, count, key)
        assert (place >= 0) == (not np.array_equal(before, room[:count]))
        assert place < 0 or room[place] == key
    wanted = np.full(count, EMPTY, np.uint64)
    nearest = np.unique(given)[:count]
    wanted[: len(nearest)] = nearest
    assert room[:count].tolist() == wanted.tolist()
    assert (room[count:] == EMPTY).all()


def test_a_flag_does_not_make_a_row_another() -> None:
    keys = keys_of([1, 2, 3], [4, 5, 6])
    keys[1] |= FLAG
    assert inserted(keys, 3, keys[1] & ~FLAG) == -1
    assert keys[1] & FLAG
