"""The simulated prefix cache: what is pinned stays, what is idle goes, books balance."""

from infra.simulator.machine.block_cache import BlockCache


def test_a_second_turn_finds_the_first() -> None:
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


def test_room_is_made_from_the_end_of_the_oldest() -> None:
    cache = BlockCache(6)
    for hashes in ([1, 2, 3], [4, 5]):
        held = cache.hold(hashes, len(hashes))
        assert held is not None
        cache.commit(held, hashes)
        cache.release(held)
    cache.take()
    assert cache.hold([7, 8, 9], 3) is not None
    assert cache.depth([1, 2, 3]) == 1
    assert cache.depth([4, 5]) == 2
    assert cache.take() == ([3, 2], [])


def test_what_is_pinned_is_never_evicted() -> None:
    cache = BlockCache(4)
    held = cache.hold([1, 2], 3)
    assert held is not None
    cache.commit(held, [1, 2])
    assert cache.hold([8, 9], 2) is None
    assert cache.depth([1, 2]) == 2
    assert cache.used == cache.pinned == 3


def test_two_that_fill_the_same_block_share_it() -> None:
    cache = BlockCache(6)
    one, two = cache.hold([1, 2], 3), cache.hold([1, 2], 3)
    assert one is not None and two is not None and cache.pinned == 6
    cache.commit(one, [1, 2])
    cache.commit(two, [1, 2])
    assert cache.pinned == 4
    cache.release(one)
    assert cache.pinned == 3
    cache.release(two)
    assert cache.pinned == 0 and cache.used == 2
