"""The simulated prefix cache: what is pinned stays, what is idle goes, books balance."""

from infra.simulator.machine.block_cache import BlockCache


def test_block_cache_reuses_blocks_of_first_turn() -> None:
    cache = BlockCache(10)
    first = cache.hold([1, 2, 3], 4)
    assert first is not None and not first.hashes
    cache.commit(first, [1, 2, 3])
    cache.release(first)
    assert cache.depth([1, 2, 3, 4]) == 3 and cache.pinned == 0
    second = cache.hold([1, 2, 3, 4], 6)
    assert second is not None and second.hashes == [1, 2, 3]
    assert cache.pinned == 6
    assert cache.take() == ([], [1, 2, 3])


def test_block_cache_evicts_tail_of_oldest_prefix() -> None:
    cache = BlockCache(6)
    for hashes in ([1, 2, 3], [4, 5]):
        blocks = cache.hold(hashes, len(hashes))
        assert blocks is not None
        cache.commit(blocks, hashes)
        cache.release(blocks)
    cache.take()
    assert cache.hold([7, 8, 9], 3) is not None
    assert cache.depth([1, 2, 3]) == 1
    assert cache.depth([4, 5]) == 2
    assert cache.take() == ([3, 2], [])


def test_block_cache_never_evicts_pinned_blocks() -> None:
    cache = BlockCache(4)
    blocks = cache.hold([1, 2], 3)
    assert blocks is not None
    cache.commit(blocks, [1, 2])
    assert cache.hold([8, 9], 2) is None
    assert cache.depth([1, 2]) == 2
    assert cache.used == cache.pinned == 3


def test_block_cache_shares_block_committed_twice() -> None:
    cache = BlockCache(6)
    first, second = cache.hold([1, 2], 3), cache.hold([1, 2], 3)
    assert first is not None and second is not None and cache.pinned == 6
    cache.commit(first, [1, 2])
    cache.commit(second, [1, 2])
    assert cache.pinned == 4
    cache.release(first)
    assert cache.pinned == 3
    cache.release(second)
    assert cache.pinned == 0 and cache.used == 2
