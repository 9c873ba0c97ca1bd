"""Token ids as they cross the log: little-endian int32, so that a long prompt costs no time."""

from array import array
from collections.abc import Sequence

from schemas.errors import RecordError

_TOKEN_BYTES = 4


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as `Request.prompt_tokens` has them."""
    return array("i", token_ids).tobytes()


def token_count(packed: bytes) -> int:
    """How many token ids are packed."""
    return len(packed) // _TOKEN_BYTES


def token_array(packed: bytes) -> "array[int]":
    """Inverse of `pack_tokens`, as cheap as a copy; raises RecordError where the length is no
    multiple of 4.
    """
    if len(packed) % _TOKEN_BYTES:
        raise RecordError(f"token ids: expected a multiple of 4 bytes, found {len(packed)}")
    return array("i", packed)


def unpack_tokens(packed: bytes) -> list[int]:
    """The same as a list."""
    return token_array(packed).tolist()
