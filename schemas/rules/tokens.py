"""Packs token ids for the log as little-endian int32, so that long prompts cost little time."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from schemas.errors import RecordError

_TOKEN_BYTES = 4
_ID_MIN, _ID_MAX = -(1 << 31), (1 << 31) - 1


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids in the form of `Request.prompt_tokens`."""
    return array("i", token_ids).tobytes()


def token_count(packed: bytes) -> int:
    """Return the number of packed token ids."""
    return len(packed) // _TOKEN_BYTES


def token_array(packed: bytes) -> "array[int]":
    """Return the array of packed token ids, as cheap as a copy. Raise RecordError unless the length
    is a multiple of 4."""
    if len(packed) % _TOKEN_BYTES:
        raise RecordError(f"token ids: expected a multiple of 4 bytes, found {len(packed)}")
    return array("i", packed)


def unpack_tokens(packed: bytes) -> list[int]:
    """Return packed token ids as a list; raises as `token_array`."""
    return token_array(packed).tolist()


def pack_ranges(token_ids: Iterable[int], vocab: int) -> bytes:
    """Return these ids and all ids outside a vocabulary of that size, packed as pairs of the first
    and the last id of a range: `Retrieval.reserved`."""
    ranges = [(_ID_MIN, -1)]
    for token_id in sorted(token_ids):
        first, last = ranges[-1]
        if token_id == last + 1 and first >= 0:
            ranges[-1] = (first, token_id)
        else:
            ranges.append((token_id, token_id))
    return pack_tokens([bound for pair in [*ranges, (vocab, _ID_MAX)] for bound in pair])


def is_insertable(packed: bytes, reserved: bytes) -> bool:
    """Return whether these are one or more token ids, none of them in a range of `pack_ranges`."""
    if not packed or len(packed) % _TOKEN_BYTES:
        return False
    ids, bounds = sorted(set(token_array(packed))), array("i", reserved[: len(reserved) & ~7])
    for first, last in zip(bounds[::2], bounds[1::2], strict=True):
        at = bisect_left(ids, first)
        if at < len(ids) and ids[at] <= last:
            return False
    return True
