"""Tables and lists that are never taken whole."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.vector.filters import parts
from workers.vector.filters.parts import ShardedDict

KEYS = st.one_of(st.integers(0, 20), st.booleans(), st.text(max_size=1), st.binary(max_size=1))


@given(st.lists(st.tuples(KEYS, st.booleans())), st.booleans())
def test_sharded_dict_behaves_like_dict(changes: list[tuple[object, bool]], is_large: bool) -> None:
    table, expected = ShardedDict[object](), dict[object, int]()
    if is_large:
        for number in range(5_000):
            table[f"key {number}"] = expected[f"key {number}"] = number
    for value, (key, comes) in enumerate(changes):
        if comes:
            table[key] = expected[key] = value
        else:
            assert table.pop(key) == expected.pop(key, None)
        assert (key in table) == (key in expected)
        assert table.get(key, -1) == expected.get(key, -1)
    assert table == expected and len(table) == len(expected)
    assert sorted(map(repr, table)) == sorted(map(repr, expected))
    table.clear()
    assert not table and list(table.items()) == []


def test_take_selects_items_by_position() -> None:
    items = [str(number) for number in range(9_000)]
    rows = np.random.default_rng(0).permutation(9_000)
    assert parts.take(items, rows) == [items[row] for row in rows]


def test_release_gradually_spares_shared_lists() -> None:
    watched = list(range(5_000))
    table, shared_table = ShardedDict[int](), ShardedDict[int]()
    table[1] = shared_table[1] = 2
    clears: list[int] = []
    table.clear = lambda: clears.append(1)  # type: ignore[method-assign]
    holder: list[Any] = [list(range(5_000)), watched, table, shared_table]
    del table
    parts.release_gradually(holder)
    assert holder == [] and clears == [1] and len(watched) == 5_000 and len(shared_table) == 1
