"""Prefix hashes: blocks at once and one at a time agree, and only equal prefixes share a hash."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import prefix

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(TOKENS, st.integers(1, 8))
def test_a_chain_can_be_extended_block_by_block(tokens: list[int], size: int) -> None:
    hashes = prefix.chain(tokens, size).tolist()
    assert len(hashes) == len(tokens) // size
    found: list[int] = []
    for first in range(0, len(hashes) * size, size):
        previous = found[-1] if found else None
        found.append(prefix.extend(previous, tokens[first : first + size], first))
    assert found == hashes


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_equal_hashes_mean_equal_prefixes(one: list[int], other: list[int], size: int) -> None:
    pairs = zip(prefix.chain(one, size).tolist(), prefix.chain(other, size).tolist(), strict=False)
    for block, (left, right) in enumerate(pairs, 1):
        assert (left == right) == (one[: block * size] == other[: block * size])


def test_order_and_repetition_matter() -> None:
    sequences = [[1, 2, 3, 4], [2, 1, 3, 4], [1, 1, 1, 1], [0, 0, 0, 0], [4, 3, 2, 1]]
    assert len({prefix.chain(tokens, 4).tolist()[0] for tokens in sequences}) == len(sequences)


def test_prompts_of_another_scope_share_no_hash() -> None:
    scopes = ["", "a", "b", "ab"]
    chains = [prefix.chain(range(64), 16, prefix.salt_of(scope)).tolist() for scope in scopes]
    assert len({value for values in chains for value in values}) == 4 * len(scopes)
    assert chains[0] == prefix.chain(range(64), 16).tolist()
    grown = prefix.extend(prefix.salt_of("a"), range(16), 0)
    assert [grown, prefix.extend(grown, range(16, 32), 16)] == chains[1][:2]


def test_packed_hashes_come_back() -> None:
    hashes = prefix.chain(range(64), 16).tolist()
    assert prefix.unpack(prefix.pack(hashes)) == hashes
    assert prefix.unpack(b"") == []
    with pytest.raises(ValueError, match="expected a multiple of 8 bytes, found 9"):
        prefix.unpack(bytes(9))
