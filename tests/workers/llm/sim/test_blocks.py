"""The block manager: no leak, no block in two places, whatever order things happen in."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.llm.sim.block_checks import block_manager, check_blocks, drop_prefix_cache
from workers.kv.layout import in_order
from workers.llm.sim.blocks import BlockManager, BlockTable, FreeBlocks, neighbours

BLOCKS = 12


def open_table(
    manager: BlockManager, hashes: list[int], blocks_now: int, blocks_max: int
) -> BlockTable:
    table = manager.open(hashes, blocks_now, blocks_max)
    assert table is not None
    return table


def remember_hashes(manager: BlockManager, table: BlockTable, hashes: list[int]) -> None:
    for block, value in zip(table.blocks, hashes, strict=False):
        manager.remember(block, value)


def test_prefix_cache_keeps_blocks_of_closed_table() -> None:
    manager = block_manager(BLOCKS)
    first = open_table(manager, [], 3, 3)
    blocks = list(first.blocks)
    remember_hashes(manager, first, [11, 12])
    manager.close(first)
    assert manager.used == 0
    second = open_table(manager, [11, 12, 13], 4, 4)
    assert second.blocks[:2] == blocks[:2]
    assert second.matched == 2
    check_blocks(manager)


def test_two_tables_share_prefix() -> None:
    manager = block_manager(BLOCKS)
    first = open_table(manager, [], 2, 2)
    remember_hashes(manager, first, [11, 12])
    second = open_table(manager, [11, 12], 2, 4)
    assert second.blocks == first.blocks
    manager.close(first)
    assert manager.used == 2
    manager.close(second)
    assert manager.used == 0
    check_blocks(manager)


def test_eviction_takes_tail_of_least_recently_used_prefix() -> None:
    manager = block_manager(4)
    for hashes in ([1, 2], [3, 4]):
        table = open_table(manager, [], 2, 2)
        remember_hashes(manager, table, hashes)
        manager.close(table)
    manager.close(open_table(manager, [1, 2], 2, 2))  # used again: now the younger one
    open_table(manager, [], 1, 1)
    assert manager.find_prefix([3, 4]) == manager.find_prefix([3])
    assert len(manager.find_prefix([3, 4])) == 1
    assert len(manager.find_prefix([1, 2])) == 2
    assert manager.evictions_total == 1


def test_block_manager_keeps_reserved_blocks_for_their_table() -> None:
    manager = block_manager(4)
    table = open_table(manager, [], 1, 3)
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
    first = open_table(manager, [], 2, 2)
    remember_hashes(manager, first, [1, 2])
    manager.close(first)
    assert manager.open([1, 2], 5, 5) is None
    assert (manager.available, manager.used) == (4, 0)
    assert manager.open([1, 2], 2, 4) is not None
    check_blocks(manager)


def test_block_manager_rejects_second_close() -> None:
    manager = block_manager(4)
    table = open_table(manager, [], 2, 2)
    manager.close(table)
    with pytest.raises(AssertionError):
        manager.close(table)


def test_detached_blocks_stay_used_until_release() -> None:
    manager = block_manager(4)
    table = open_table(manager, [], 3, 4)
    detached_blocks = manager.detach(table, 1)
    manager.close(table)
    assert manager.used == 2
    manager.release(detached_blocks)
    assert manager.used == 0
    check_blocks(manager)


def descriptors(local: list[int], remote: list[int]) -> int:
    """Of a move of these blocks: neighbours on both sides are moved as one."""
    pairs = [*zip(*in_order(local, remote), strict=True)]
    return sum(
        not at or (pairs[at - 1][0] + 1, pairs[at - 1][1] + 1) != pair
        for at, pair in enumerate(pairs)
    )


@pytest.mark.parametrize(("has_prefix_cache", "descriptors_max"), [(False, 1.2), (True, 3.0)])
def test_block_manager_keeps_prompts_contiguous_after_churn(
    has_prefix_cache: bool, descriptors_max: float
) -> None:
    """A move of 36.8 blocks takes 1.1 descriptors, or 2.4 if all free blocks are cached."""
    rng, prefill, decode = random.Random(1), block_manager(2_048), block_manager(2_048)
    computed: list[BlockTable] = []
    answering: list[BlockTable] = []
    moved: list[int] = []
    for number in range(1_500):
        blocks = rng.randint(4, 70)
        computed.append(open_table(prefill, [], blocks, blocks))
        while (table := decode.open([], blocks, blocks + rng.randint(1, 30))) is None:
            decode.close(answering.pop(rng.randrange(len(answering))))
        moved.append(descriptors(computed[-1].blocks, table.blocks))
        if has_prefix_cache:
            remember_hashes(prefill, computed[-1], [100 * number + at for at in range(blocks)])
        answering.append(table)
        for growing_table in rng.sample(answering, min(8, len(answering))):
            if growing_table.reserved:
                decode.grow(growing_table)
        if len(computed) > 12:
            prefill.close(computed.pop(rng.randrange(len(computed))))
    settled = moved[500:]
    assert sum(settled) / len(settled) < descriptors_max
    check_blocks(prefill)
    check_blocks(decode)


def stretches(blocks: list[int]) -> int:
    return sum(not at or blocks[at - 1] + 1 != block for at, block in enumerate(blocks))


@given(st.sets(st.integers(0, 40), min_size=1), st.data())
def test_free_blocks_come_in_fewest_stretches(free: set[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(free)))
    pool = FreeBlocks(41)
    assert sorted(pool.take(41, -1)) == [*range(41)]
    for block in data.draw(st.permutations(sorted(free))):
        pool.add(block)
    lengths = sorted((len(piece.split(",")) for piece in _pieces(free)), reverse=True)
    fewest = next(n for n in range(1, len(lengths) + 1) if sum(lengths[:n]) >= count)
    assert stretches(sorted(neighbours(free, count))) == fewest
    blocks = [*pool.take(count, -1)]
    assert stretches(sorted(blocks)) == fewest
    assert len(pool) == len(free) - count
    assert {*pool} == free - {*blocks}


def _pieces(free: set[int]) -> list[str]:
    """Stretches of neighbours, as texts."""
    marks = "".join(f"{at}," if at in free else " " for at in range(41))
    return [piece.rstrip(",") for piece in marks.split()]


def test_growing_table_takes_adjacent_blocks() -> None:
    manager = block_manager(8)
    first, second = open_table(manager, [], 2, 4), open_table(manager, [], 1, 1)
    manager.close(second)
    manager.grow(first)
    manager.grow(first)
    assert first.blocks == [0, 1, 2, 3]


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
def test_block_manager_never_loses_or_duplicates_blocks(
    operations: list[tuple[str, int, list[int]]],
) -> None:
    manager = block_manager(BLOCKS)
    tables: list[tuple[BlockTable, list[int]]] = []
    loose: list[list[int]] = []
    for name, number, chain in operations:
        table, hashes = tables[number % len(tables)] if tables else (None, [])
        if name == "open":
            new_table = manager.open(chain, len(chain) + 1, len(chain) + 1 + number % 3)
            if new_table is not None:
                tables.append((new_table, chain))
        elif name == "settle" and loose:
            manager.release(loose.pop())
        elif name == "forget":
            drop_prefix_cache(manager)
        elif table is not None and name == "grow" and table.reserved:
            manager.grow(table)
        elif table is not None and name == "remember":
            remember_hashes(manager, table, hashes)
        elif table is not None and name == "detach":
            loose.append(manager.detach(table, table.matched))
        elif table is not None and name == "close":
            tables.remove((table, hashes))
            manager.close(table)
        check_blocks(manager)
        used_blocks = {block for used_table, _ in tables for block in used_table.blocks}
        assert manager.used == len(used_blocks | {block for blocks in loose for block in blocks})
    for table, _ in tables:
        manager.close(table)
    for blocks in loose:
        manager.release(blocks)
    assert manager.used == 0
    assert manager.available == BLOCKS
