"""Changes of a prefix cache, coalesced and bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.kv.block_log import BlockLog


def test_block_log_reports_changes_once() -> None:
    blocks = BlockLog(16, 8)
    blocks.add([1, 2, 3])
    blocks.add([2])
    assert blocks.take() == ([], [1, 2, 3])
    assert blocks.take() == ([], [])
    blocks.discard([2, 9])
    blocks.add([4])
    assert blocks.take() == ([2], [4])
    assert (blocks.snapshot(), len(blocks), blocks.block_size) == ([1, 3, 4], 3, 16)


@pytest.mark.parametrize("is_reported", [True, False])
def test_block_log_omits_block_removed_and_added_again(is_reported: bool) -> None:
    blocks = BlockLog(16, 8)
    blocks.add([1])
    if is_reported:
        blocks.take()
    blocks.discard([1])
    blocks.add([1])
    assert blocks.take() == ([], [] if is_reported else [1])
    blocks.add([2])
    blocks.discard([2])
    assert blocks.take() == ([], [])


def test_block_log_reports_cleared_blocks_as_removed() -> None:
    blocks = BlockLog(16, 8)
    blocks.add([1, 2])
    blocks.take()
    blocks.add([3])
    blocks.clear()
    blocks.add([2])
    assert blocks.take() == ([1], [])
    assert blocks.snapshot() == [2]


def test_block_log_drops_oldest_beyond_limit() -> None:
    blocks = BlockLog(16, 2)
    blocks.add([1, 2])
    blocks.take()
    blocks.add([3])
    assert blocks.snapshot() == [2, 3]
    blocks.discard([1])  # when the engine evicts it at last
    assert blocks.take() == ([1], [3])


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "discard", "clear", "take"]), st.integers(0, 9)),
    max_size=60,
)


@given(STEPS, st.integers(1, 6))
def test_block_log_changes_reproduce_snapshot(
    steps: list[tuple[str, int]], blocks_max: int
) -> None:
    blocks, mirror = BlockLog(16, blocks_max), set[int]()

    def apply() -> None:
        removed, stored = blocks.take()
        assert set(removed) <= mirror
        assert not mirror & set(stored)
        assert max(len(removed), len(stored)) <= blocks_max
        mirror.difference_update(removed)
        mirror.update(stored)
        assert mirror == set(blocks.snapshot())

    for what, block in steps:
        if what == "take":
            apply()
        elif what == "clear":
            blocks.clear()
        else:
            getattr(blocks, what)([block])
        assert len(blocks) <= blocks_max
    apply()
