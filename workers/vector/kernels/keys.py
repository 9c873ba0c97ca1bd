"""Sort keys of neighbours: distance, then row, then a flag, in one unsigned 64-bit number.

The order of keys is that of (distance, row), a total order, so that every merge of lists has one
result. The lowest bit is the list owner's flag: an expanded entry in a search, an old one in a
build. An empty place has `EMPTY`, which is greater than all keys.
"""

from typing import Any

import numpy as np
from llvmlite import ir

from workers.vector.kernels.jit import emitted, inlined, types
from workers.vector.kernels.lists import count_below, move_up
from workers.vector.kernels.memory import get_u64, put_u64

EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)
FLAG = np.uint64(1)
LIMIT = EMPTY - FLAG  # keys from here on are empty, with either flag
NOWHERE = np.uint32(0xFFFFFFFF)  # no row
_32, _ONE = np.uint64(32), np.uint64(1)
_LOW = np.uint64(0xFFFFFFFF)
_SIGN, _ALL = np.uint32(0x80000000), np.uint32(0xFFFFFFFF)


@emitted(types.uint32, types.float32)
def _bits(builder: Any, value: Any) -> Any:
    """Return the bits of a float32."""
    return builder.bitcast(value, ir.IntType(32))


@emitted(types.float32, types.uint32)
def _value(builder: Any, bits: Any) -> Any:
    """Return the float32 with these bits."""
    return builder.bitcast(bits, ir.FloatType())


@inlined
def key_of(distance: Any, row: int) -> Any:
    """Return the key of a row at a distance (float32, not NaN), flag clear."""
    bits = _bits(distance + np.float32(0.0))  # no negative zero
    ordered = np.uint64((bits ^ _ALL) if bits & _SIGN else (bits | _SIGN))
    return (ordered << _32) | (np.uint64(row) << _ONE)


@inlined
def row_of(key: Any) -> Any:
    """Return the row of a key that is not empty."""
    return np.intp((key & _LOW) >> _ONE)


@inlined
def distance_of(key: Any) -> Any:
    """Return the distance of a key that is not empty."""
    ordered = np.uint32(key >> _32)
    return _value((ordered ^ _SIGN) if ordered & _SIGN else (ordered ^ _ALL))


@inlined
def insert(keys: int, count: int, key: Any) -> int:
    """Insert into `count` ascending keys, uint64 at an address; return the place, or -1.

    The last key is dropped. A key that is in the list already is not inserted again. Flags are
    ignored.
    """
    if key >= (get_u64(keys, count - 1) & ~FLAG):
        return -1
    place: int = count_below(keys, count, key)
    if (get_u64(keys, place) & ~FLAG) == key:
        return -1
    move_up(keys, count, place)
    put_u64(keys, place, key)
    return place


def rows_and_distances(keys: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Return rows (int64) and distances (float32) of an array of keys that are not empty."""
    ordered = (keys >> _32).astype(np.uint32)
    ordered ^= _SIGN | ((ordered >> np.uint32(31)) - np.uint32(1))
    return ((keys & _LOW) >> _ONE).astype(np.int64), ordered.view(np.float32)
