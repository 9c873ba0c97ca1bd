"""Arrays for kernels, made and read with NumPy: aligned matrices, addresses, bit sets.

A bit set of rows is uint32, shape (ceil(rows / 32),): row r is bit r % 32 of word r // 32.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

LINE_BYTES = 64  # a cache line of the processor
WORD_BITS = 32  # bits in a word of a bit set


def aligned(rows: int, columns: int, dtype: Any) -> Array:
    """Allocate an uninitialised matrix, (rows, columns), that begins at a cache line."""
    size = rows * columns * np.dtype(dtype).itemsize
    memory = np.empty(size + LINE_BYTES, np.uint8)
    first = -memory.ctypes.data % LINE_BYTES
    matrix: Array = memory[first : first + size].view(dtype).reshape(rows, columns)
    return matrix


def gather_rows(matrix: Array, rows: Array) -> Array:
    """Copy some rows, int64, of a matrix to a new one made by `aligned`."""
    out = aligned(len(rows), matrix.shape[1], matrix.dtype)
    out[:] = matrix[rows]
    return out


def grow(matrix: Array, rows: int) -> Array:
    """Return a matrix of more rows, made by `aligned`, which begins with the rows of `matrix`.

    It shares their memory if there is room behind them. So of several matrices in one memory, only
    the longest may grow.
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
    """Return the address of an array; the caller keeps the array alive."""
    return int(array.ctypes.data)


def row_addresses(matrix: Array) -> list[int]:
    """Return the address of each row of a matrix."""
    return [int(row.ctypes.data) for row in matrix]


def stored_bits(vectors: Array) -> Array:
    """View vectors as kernels take them: float16, which they do not support, as uint16."""
    return vectors.view(np.uint16) if vectors.dtype == np.float16 else vectors


def pack_bits(mask: Array) -> Array:
    """Return the bit set of a mask, bool (rows,)."""
    whole = np.zeros(-(-len(mask) // 32) * 32, bool)
    whole[: len(mask)] = mask
    return np.packbits(whole, bitorder="little").view("<u4")


def unpack_bits(bits: Array, count: int) -> Array:
    """Return the first `count` bits of a bit set: bool (count,)."""
    return np.unpackbits(bits.view(np.uint8), count=count, bitorder="little").astype(bool)


def are_in(bits: Array, rows: Array) -> Array:
    """Return for each of `rows`, int64, whether it is in a bit set: bool, same shape."""
    inside: Array = bits[rows // WORD_BITS] >> (rows % WORD_BITS).astype(np.uint32) & 1 != 0
    return inside


def members(bits: Array) -> Array:
    """Return the rows in a bit set, ascending, int64."""
    words = np.flatnonzero(bits)
    word_bits = np.unpackbits(bits[words].view(np.uint8), bitorder="little").reshape(-1, WORD_BITS)
    word, bit = np.nonzero(word_bits)
    rows: Array = words[word] * WORD_BITS + bit
    return rows


def first_bits(bits: Array, count: int) -> Array:
    """Copy the first `count` bits of a bit set to a new one."""
    first = bits[: -(-count // WORD_BITS)].copy()
    if count % WORD_BITS:
        first[-1] &= np.uint32((1 << count % WORD_BITS) - 1)
    return first


def all_but(dead: Array, count: int) -> Array:
    """Return the bit set of the first `count` rows without the `dead` ones, int64."""
    mask = np.ones(count, bool)
    mask[dead] = False
    return pack_bits(mask)
