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
    """Return the words of a block of an arena, over all ranks."""
    words: list[int] = np.concatenate([*regions[:, block]]).tolist()
    return words


def test_card_survives_packing_and_rejects_truncation() -> None:
    card = Card((1, 2**40), 64, 6, "engine-é", b"\x00agent")
    assert Card.unpack(card.pack()) == card
    for data in (b"", card.pack()[:11], card.pack()[:20]):
        with pytest.raises(ValueError, match="KV metadata: expected"):
            Card.unpack(data)


@pytest.mark.parametrize(("target_ranks", "source_ranks"), [(1, 1), (1, 4), (4, 1), (2, 4)])
def test_spans_map_blocks_between_any_ranks(target_ranks: int, source_ranks: int) -> None:
    to, source = arena(target_ranks, 1), arena(source_ranks, 2)
    before = to.copy()
    local_card, remote_card = card_of(to, "a", b""), card_of(source, "b", b"")
    local_card.check("a", remote_card)
    local, remote = [5, 1, 2], [0, 3, 4]
    for at, place, count in spans(local_card, local, remote_card, remote):
        ctypes.memmove(at, place, count)
    for here, there in zip(local, remote, strict=True):
        assert whole(to, here) == whole(source, there)
    for block in {*range(BLOCKS)} - {*local}:
        assert whole(to, block) == whole(before, block)


def test_spans_merge_blocks_adjacent_on_both_sides() -> None:
    local_card, remote_card = (card_of(arena(1, seed), "a", b"") for seed in (1, 2))
    merged_spans = list(spans(local_card, [3, 2, 0], remote_card, [4, 3, 0]))
    assert [count for *_, count in merged_spans] == [64, 128]


def test_elements_are_numbered_by_row() -> None:
    local_card, remote_card = card_of(arena(1, 1), "a", b""), card_of(arena(4, 2), "b", b"")
    assert pieces_of(local_card, remote_card) == 4
    assert elements([0, 5], 2, BLOCKS).tolist() == [0, 5, 6, 11]


def test_card_check_rejects_incompatible_arena() -> None:
    local_card, remote_card = card_of(arena(4, 1), "a", b""), card_of(arena(4, 2), "b", b"")
    for wrong, why in (
        (remote_card, "expected engine a"),
        (replace(local_card, block_bytes=32), "expected 64 bytes"),
        (replace(local_card, regions=(1, 2, 3)), "tensor parallelism"),
        (replace(local_card, regions=()), "tensor parallelism"),
    ):
        with pytest.raises(ValueError, match=why):
            wrong.check("a", card_of(arena(4, 1), "a", b""))
