"""Arrays as kernels want them, made and read with NumPy: aligned matrices, addresses, bit sets.

A bit set of rows is uint32, shape (ceil(rows / 32),): row r is bit r % 32 of word r // 32.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

LINE_BYTES = 64  # of the processor's cache
WORD_BITS = 32  # of a bit set


def aligned(rows: int, columns: int, dtype: Any) -> Array:
    """An uninitialised matrix, shape (rows, columns), that begins at a cache line."""
    size = rows * columns * np.dtype(dtype).itemsize
    memory = np.empty(size + LINE_BYTES, np.uint8)
    first = -memory.ctypes.data % LINE_BYTES
    matrix: Array = memory[first : first + size].view(dtype).reshape(rows, columns)
    return matrix


def gather_rows(matrix: Array, rows: Array) -> Array:
    """Some rows of a matrix, int64, in one that is made by `aligned`."""
    out = aligned(len(rows), matrix.shape[1], matrix.dtype)
    out[:] = matrix[rows]
    return out


def grow(matrix: Array, rows: int) -> Array:
    """A matrix of more rows, of which the first are those of `matrix`, made by `aligned`.

    It shares their memory where there is room behind them. So of several matrices in one memory,
    only the longest may grow.
    """
    memory = matrix.base
    if memory is not None and memory.dtype == np.uint8 and memory.flags.writeable:
        first = address_of(matrix) - address_of(memory)
        size = rows * matrix.strides[0]
        if first + size <= memory.nbytes:
            longer: Array = memory[first : first + size].view(matrix.dtype).reshape(rows, -1)
            return longer
    larger = aligned(rows + rows // 2, matrix.shape[1], matrix.dtype)
    larger[: len(matrix)] = matrix
    return larger[:rows]


def address_of(array: Array) -> int:
    """Where an array begins; whoever keeps the number keeps the array alive."""
    return int(array.ctypes.data)


def row_addresses(matrix: Array) -> list[int]:
    """Where each row of a matrix begins."""
    return [int(row.ctypes.data) for row in matrix]


def stored_bits(vectors: Array) -> Array:
    """Vectors as kernels take them, which know no float16: the same memory, uint16 for float16."""
    return vectors.view(np.uint16) if vectors.dtype == np.float16 else vectors


def pack_bits(mask: Array) -> Array:
    """The bit set of a mask, shape (rows,), bool."""
    whole = np.zeros(-(-len(mask) // 32) * 32, bool)
    whole[: len(mask)] = mask
    return np.packbits(whole, bitorder="little").view("<u4")


def unpack_bits(bits: Array, count: int) -> Array:
    """The first `count` bits of a bit set: shape (count,), bool."""
    return np.unpackbits(bits.view(np.uint8), count=count, bitorder="little").astype(bool)


def are_in(bits: Array, rows: Array) -> Array:
    """Whether rows, int64, are in a bit set: bool, same shape."""
    inside: Array = bits[rows // WORD_BITS] >> (rows % WORD_BITS).astype(np.uint32) & 1 != 0
    return inside


def members(bits: Array) -> Array:
    """Rows in a bit set, ascending, int64."""
    words = np.flatnonzero(bits)
    word_bits = np.unpackbits(bits[words].view(np.uint8), bitorder="little").reshape(-1, WORD_BITS)
    word, bit = np.nonzero(word_bits)
    rows: Array = words[word] * WORD_BITS + bit
    return rows


def first_bits(bits: Array, count: int) -> Array:
    """The first `count` bits of a bit set, as one of its own."""
    first = bits[: -(-count // WORD_BITS)].copy()
    if count % WORD_BITS:
        first[-1] &= np.uint32((1 << count % WORD_BITS) - 1)
    return first


def all_but(dead: Array, count: int) -> Array:
    """The bit set of the first `count` rows without the dead ones, int64."""
    mask = np.ones(count, bool)
    mask[dead] = False
    return pack_bits(mask)
