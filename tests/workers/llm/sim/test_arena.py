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
def test_arena_restores_values_from_intact_bytes(bytes_per_token: int) -> None:
    arena = arena_with(TOKENS[:10], [3, 9, 1], bytes_per_token)
    digest = arena.digest(TOKENS[:10])
    assert arena.read([3, 9, 1]).tolist() == [*digest.chain, digest.tail]
    assert arena.state([3, 9, 1], 2)[1:] == (digest.chain[1], digest.tail)


@settings(max_examples=40)
@given(st.integers(0, 2), st.integers(0, SIZE * 16 - 1), st.integers(1, 255))
def test_arena_state_depends_on_every_byte(block: int, byte: int, change: int) -> None:
    arena = arena_with(TOKENS[:10], [0, 1, 2])
    before = arena.state([0, 1, 2], 2)
    arena.regions[0].view(np.uint8)[block, byte] ^= change
    assert arena.state([0, 1, 2], 2) != before


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_split_heads_of_every_block(ranks: int) -> None:
    """The shares of all ranks concatenate to the block of a single rank."""
    whole_arena, parallel_arena = KvArena(4, SIZE, 16), KvArena(4, SIZE, 16, tensor_parallel=ranks)
    values = whole_arena.digest(TOKENS[:10]).values(0)
    for arena in (whole_arena, parallel_arena):
        arena.write([2, 0, 3], values)
        assert arena.read([2, 0, 3]).tolist() == values.tolist()
    assert parallel_arena.regions.shape == (ranks, 4, 8 // ranks)
    assert (np.concatenate(list(parallel_arena.regions), axis=1) == whole_arena.regions[0]).all()
    parallel_arena.regions[[0, -1]] = parallel_arena.regions[[-1, 0]]  # heads in the wrong order
    assert (parallel_arena.read([2, 0, 3]).tolist() == values.tolist()) is (ranks == 1)


def test_arena_values_equal_canonical_hashes() -> None:
    digest = KvArena(4, SIZE, 8).digest(TOKENS[:10])
    assert digest.chain == prefix.chain(TOKENS[:10], SIZE).tolist()
    assert digest.chain[-1] == sum(prefix.terms(TOKENS[:8]).tolist()) % (1 << 64)
    assert prefix.extend(EMPTY, TOKENS[:SIZE], 0) == digest.chain[0]


def test_arena_state_depends_on_block_order() -> None:
    arena = arena_with(TOKENS[:12], [0, 1, 2])
    assert arena.state([0, 1, 2], 0) != arena.state([1, 0, 2], 0)


def test_digest_extends_by_tokens() -> None:
    arena = KvArena(4, SIZE, 8)
    short, long = arena.digest(TOKENS[:9]), arena.digest(TOKENS)
    assert list(long.chain[:2]) == list(short.chain)
    assert arena.digest([7, *TOKENS[1:9]]).chain[1] != short.chain[1]
    assert arena.digest([0]).tail != arena.digest([0, 0]).tail


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=8))
def test_vector_mix_equals_scalar_mix(values: list[int]) -> None:
    assert mix_all(np.array(values, np.uint64)).tolist() == [mix(value) for value in values]
