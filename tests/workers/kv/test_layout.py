"""Arenas in memory: a card comes back whole, and pieces of two arenas correspond byte by byte."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from workers.kv.layout import Card, card_of, elements, pieces_of, spans

BLOCKS, WORDS = 6, 8
Regions = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


def arena(ranks: int, seed: int) -> Regions:
    random = np.random.default_rng(seed)
    return random.integers(0, 2**63, (ranks, BLOCKS, WORDS // ranks), np.uint64)


def whole(regions: Regions, block: int) -> list[int]:
    """A block of an arena, over all ranks."""
    found: list[int] = np.concatenate([*regions[:, block]]).tolist()
    return found


def test_a_card_comes_back_whole_and_a_part_of_one_is_refused() -> None:
    card = Card((1, 2**40), 64, 6, "engine-é", b"\x00agent")
    assert Card.unpack(card.pack()) == card
    for data in (b"", card.pack()[:11], card.pack()[:20]):
        with pytest.raises(ValueError, match="KV metadata: expected"):
            Card.unpack(data)


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (1, 4), (4, 1), (2, 4)])
def test_blocks_arrive_whatever_the_ranks_are(ours: int, theirs: int) -> None:
    to, source = arena(ours, 1), arena(theirs, 2)
    before = to.copy()
    mine, other = card_of(to, "a", b""), card_of(source, "b", b"")
    mine.check("a", other)
    local, remote = [5, 1, 2], [0, 3, 4]
    for at, place, count in spans(mine, local, other, remote):
        ctypes.memmove(at, place, count)
    for here, there in zip(local, remote, strict=True):
        assert whole(to, here) == whole(source, there)
    for block in {*range(BLOCKS)} - {*local}:
        assert whole(to, block) == whole(before, block)


def test_neighbours_on_both_sides_move_together() -> None:
    mine, other = (card_of(arena(1, seed), "a", b"") for seed in (1, 2))
    found = list(spans(mine, [3, 2, 0], other, [4, 3, 0]))
    assert [count for *_, count in found] == [64, 128]


def test_elements_are_numbered_row_by_row() -> None:
    mine, other = card_of(arena(1, 1), "a", b""), card_of(arena(4, 2), "b", b"")
    assert pieces_of(mine, other) == 4
    assert elements([0, 5], 2, BLOCKS).tolist() == [0, 5, 6, 11]


def test_an_arena_that_cannot_be_meant_is_refused() -> None:
    mine, other = card_of(arena(4, 1), "a", b""), card_of(arena(4, 2), "b", b"")
    for wrong, why in (
        (other, "expected engine a"),
        (replace(mine, block_bytes=32), "expected 64 bytes"),
        (replace(mine, regions=(1, 2, 3)), "tensor parallelism"),
        (replace(mine, regions=()), "tensor parallelism"),
    ):
        with pytest.raises(ValueError, match=why):
            wrong.check("a", card_of(arena(4, 1), "a", b""))
