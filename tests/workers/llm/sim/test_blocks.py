"""The block manager: no leak, no block in two places, whatever order things happen in."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.llm.sim.block_checks import block_manager, check_blocks, drop_prefix_cache
from workers.llm.sim.blocks import BlockManager, BlockTable

BLOCKS = 12


def opened(manager: BlockManager, hashes: list[int], now: int, most: int) -> BlockTable:
    table = manager.open(hashes, now, most)
    assert table is not None
    return table


def remembered(manager: BlockManager, table: BlockTable, hashes: list[int]) -> None:
    for block, value in zip(table.blocks, hashes, strict=False):
        manager.remember(block, value)


def test_prefix_is_found_again_after_its_table_closed() -> None:
    manager = block_manager(BLOCKS)
    first = opened(manager, [], 3, 3)
    blocks = list(first.blocks)
    remembered(manager, first, [11, 12])
    manager.close(first)
    assert manager.used == 0
    second = opened(manager, [11, 12, 13], 4, 4)
    assert second.blocks[:2] == blocks[:2]
    assert second.matched == 2
    check_blocks(manager)


def test_prefix_is_shared_by_two_tables() -> None:
    manager = block_manager(BLOCKS)
    first = opened(manager, [], 2, 2)
    remembered(manager, first, [11, 12])
    second = opened(manager, [11, 12], 2, 4)
    assert second.blocks == first.blocks
    manager.close(first)
    assert manager.used == 2
    manager.close(second)
    assert manager.used == 0
    check_blocks(manager)


def test_least_recently_used_is_evicted_first_and_tails_before_heads() -> None:
    manager = block_manager(4)
    for hashes in ([1, 2], [3, 4]):
        table = opened(manager, [], 2, 2)
        remembered(manager, table, hashes)
        manager.close(table)
    manager.close(opened(manager, [1, 2], 2, 2))  # used again: now the younger one
    opened(manager, [], 1, 1)
    assert manager.matched([3, 4]) == manager.matched([3])
    assert len(manager.matched([3, 4])) == 1
    assert len(manager.matched([1, 2])) == 2
    assert manager.evictions_total == 1


def test_reserved_blocks_are_promised_to_nobody_else() -> None:
    manager = block_manager(4)
    table = opened(manager, [], 1, 3)
    assert manager.available == 1
    assert manager.open([], 2, 2) is None
    assert manager.open([], 1, 2) is None
    manager.grow(table)
    manager.grow(table)
    with pytest.raises(AssertionError):
        manager.grow(table)
    assert manager.available == 1
    manager.close(table)
    assert manager.available == 4


def test_refused_table_changes_nothing() -> None:
    manager = block_manager(4)
    first = opened(manager, [], 2, 2)
    remembered(manager, first, [1, 2])
    manager.close(first)
    assert manager.open([1, 2], 5, 5) is None
    assert (manager.available, manager.used) == (4, 0)
    assert manager.open([1, 2], 2, 4) is not None
    check_blocks(manager)


def test_closing_twice_is_a_bug() -> None:
    manager = block_manager(4)
    table = opened(manager, [], 2, 2)
    manager.close(table)
    with pytest.raises(AssertionError):
        manager.close(table)


def test_detached_blocks_stay_held_until_released() -> None:
    manager = block_manager(4)
    table = opened(manager, [], 3, 4)
    taken = manager.detach(table, 1)
    manager.close(table)
    assert manager.used == 2
    manager.release(taken)
    assert manager.used == 0
    check_blocks(manager)


CHAINS = st.lists(st.integers(1, 3), max_size=5).map(
    lambda steps: [hash(tuple(steps[: i + 1])) for i in range(len(steps))]
)
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "grow", "close", "remember", "detach", "settle", "forget"]),
        st.integers(0, 7),
        CHAINS,
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(OPERATIONS)
def test_blocks_are_never_lost_or_given_twice(operations: list[tuple[str, int, list[int]]]) -> None:
    manager = block_manager(BLOCKS)
    tables: list[tuple[BlockTable, list[int]]] = []
    loose: list[list[int]] = []
    for name, number, chain in operations:
        table, hashes = tables[number % len(tables)] if tables else (None, [])
        if name == "open":
            found = manager.open(chain, len(chain) + 1, len(chain) + 1 + number % 3)
            if found is not None:
                tables.append((found, chain))
        elif name == "settle" and loose:
            manager.release(loose.pop())
        elif name == "forget":
            drop_prefix_cache(manager)
        elif table is not None and name == "grow" and table.reserved:
            manager.grow(table)
        elif table is not None and name == "remember":
            remembered(manager, table, hashes)
        elif table is not None and name == "detach":
            loose.append(manager.detach(table, table.matched))
        elif table is not None and name == "close":
            tables.remove((table, hashes))
            manager.close(table)
        check_blocks(manager)
        held = {block for each, _ in tables for block in each.blocks}
        assert manager.used == len(held | {block for blocks in loose for block in blocks})
    for table, _ in tables:
        manager.close(table)
    for blocks in loose:
        manager.release(blocks)
    assert manager.used == 0
    assert manager.available == BLOCKS
