"""KV bytes: intact ones give their value back, and every byte counts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import prefix
from schemas.prefix import mix as mix_all
from workers.llm.sim.arena import EMPTY, KvArena, mix

SIZE = 4


TOKENS = list(range(100, 120))


def arena_with(tokens: list[int], blocks: list[int], bytes_per_token: int = 16) -> KvArena:
    arena = KvArena(16, SIZE, bytes_per_token)
    values = arena.digest(tokens).values(0)
    arena.write(blocks[: len(values)], values)
    return arena


@pytest.mark.parametrize("bytes_per_token", [2, 8, 16, 50, 256])
def test_intact_bytes_give_the_values_back(bytes_per_token: int) -> None:
    arena = arena_with(TOKENS[:10], [3, 9, 1], bytes_per_token)
    digest = arena.digest(TOKENS[:10])
    assert arena.read([3, 9, 1]).tolist() == [*digest.chain, digest.tail]
    assert arena.state([3, 9, 1], 2)[1:] == (digest.chain[1], digest.tail)


@settings(max_examples=40)
@given(st.integers(0, 2), st.integers(0, SIZE * 16 - 1), st.integers(1, 255))
def test_every_byte_counts(block: int, byte: int, change: int) -> None:
    arena = arena_with(TOKENS[:10], [0, 1, 2])
    before = arena.state([0, 1, 2], 2)
    arena.regions[0].view(np.uint8)[block, byte] ^= change
    assert arena.state([0, 1, 2], 2) != before


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_hold_their_heads_of_every_block(ranks: int) -> None:
    """Whatever the degree, the ranks' shares of a block are the block of one rank."""
    one, many = KvArena(4, SIZE, 16), KvArena(4, SIZE, 16, tensor_parallel=ranks)
    values = one.digest(TOKENS[:10]).values(0)
    for arena in (one, many):
        arena.write([2, 0, 3], values)
        assert arena.read([2, 0, 3]).tolist() == values.tolist()
    assert many.regions.shape == (ranks, 4, 8 // ranks)
    assert (np.concatenate(list(many.regions), axis=1) == one.regions[0]).all()
    many.regions[[0, -1]] = many.regions[[-1, 0]]  # heads in the wrong order
    assert (many.read([2, 0, 3]).tolist() == values.tolist()) is (ranks == 1)


def test_values_are_the_canonical_hashes() -> None:
    digest = KvArena(4, SIZE, 8).digest(TOKENS[:10])
    assert digest.chain == prefix.chain(TOKENS[:10], SIZE).tolist()
    assert digest.chain[-1] == sum(prefix.terms(TOKENS[:8]).tolist()) % (1 << 64)
    assert prefix.extend(EMPTY, TOKENS[:SIZE], 0) == digest.chain[0]


def test_order_of_blocks_counts() -> None:
    arena = arena_with(TOKENS[:12], [0, 1, 2])
    assert arena.state([0, 1, 2], 0) != arena.state([1, 0, 2], 0)


def test_digest_extends_by_tokens() -> None:
    arena = KvArena(4, SIZE, 8)
    short, long = arena.digest(TOKENS[:9]), arena.digest(TOKENS)
    assert list(long.chain[:2]) == list(short.chain)
    assert arena.digest([7, *TOKENS[1:9]]).chain[1] != short.chain[1]
    assert arena.digest([0]).tail != arena.digest([0, 0]).tail


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=8))
def test_vectors_mix_as_numbers_do(values: list[int]) -> None:
    assert mix_all(np.array(values, np.uint64)).tolist() == [mix(value) for value in values]
