"""Token ids as bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import RecordError
from schemas.rules.tokens import pack_tokens, token_count, unpack_tokens
from tests.schemas.examples import INT_MAX


@given(st.lists(st.integers(-INT_MAX - 1, INT_MAX)))
def test_token_ids_survive_packing(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert (len(packed), token_count(packed)) == (4 * len(token_ids), len(token_ids))
    assert unpack_tokens(packed) == token_ids


def test_tokens_are_packed_little_endian() -> None:
    assert pack_tokens([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_unpack_tokens_rejects_odd_length() -> None:
    with pytest.raises(RecordError, match="expected a multiple of 4 bytes, found 3"):
        unpack_tokens(b"abc")
