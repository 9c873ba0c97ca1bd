"""Prefix hashes: blocks at once and one at a time agree, and only equal prefixes share a hash."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import prefix

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(TOKENS, st.integers(1, 8))
def test_prefix_chain_extends_block_by_block(tokens: list[int], size: int) -> None:
    hashes = prefix.chain(tokens, size).tolist()
    assert len(hashes) == len(tokens) // size
    chain_hashes: list[int] = []
    for first in range(0, len(hashes) * size, size):
        previous = chain_hashes[-1] if chain_hashes else None
        chain_hashes.append(prefix.extend(previous, tokens[first : first + size], first))
    assert chain_hashes == hashes


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_equal_prefix_hashes_mean_equal_prefixes(
    first: list[int], second: list[int], size: int
) -> None:
    pairs = zip(
        prefix.chain(first, size).tolist(), prefix.chain(second, size).tolist(), strict=False
    )
    for block, (first_hash, second_hash) in enumerate(pairs, 1):
        assert (first_hash == second_hash) == (first[: block * size] == second[: block * size])


def test_prefix_hash_depends_on_order_and_repetition() -> None:
    sequences = [[1, 2, 3, 4], [2, 1, 3, 4], [1, 1, 1, 1], [0, 0, 0, 0], [4, 3, 2, 1]]
    assert len({prefix.chain(tokens, 4).tolist()[0] for tokens in sequences}) == len(sequences)


def test_prompts_of_different_scopes_share_no_prefix_hash() -> None:
    scopes = ["", "a", "b", "ab"]
    chains = [prefix.chain(range(64), 16, prefix.salt_of(scope)).tolist() for scope in scopes]
    assert len({value for values in chains for value in values}) == 4 * len(scopes)
    assert chains[0] == prefix.chain(range(64), 16).tolist()
    scope_hash = prefix.extend(prefix.salt_of("a"), range(16), 0)
    assert [scope_hash, prefix.extend(scope_hash, range(16, 32), 16)] == chains[1][:2]


def test_packed_prefix_hashes_round_trip() -> None:
    hashes = prefix.chain(range(64), 16).tolist()
    assert prefix.unpack(prefix.pack(hashes)) == hashes
    assert prefix.unpack(b"") == []
    with pytest.raises(ValueError, match="expected a multiple of 8 bytes, found 9"):
        prefix.unpack(bytes(9))
