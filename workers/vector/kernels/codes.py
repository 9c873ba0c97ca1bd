"""Short codes of vectors, which show that a row is too far without a read of its vector.

Theory of operation. A search spends its time on reading vectors, mostly of rows that are too far
for its list. A code is one byte per value: the nearest of 256 levels, with one step for all
dimensions, from the least value of each dimension (the approximation of a VA-file: Weber, Schek and
Blott, VLDB 1998). The largest error of a row's code is known, and the query is coded too. By the
triangle inequality (for inner products, that of Cauchy and Schwarz) a row is farther than the worst
entry of a list if its code is farther by more than both errors. It is dropped, and no result
changes: codes only decide which vectors need not be read, never a distance. Distances of codes are
sums of integers, and take a fifth of the time.

One row of huge values must not make the steps coarse for all others. So the range is that of nearly
all rows, and values outside are clipped to it. By squared distance, to clip a row and a query only
moves them nearer to each other (projections onto a box never move two points apart), so the bound
holds for all rows. By inner product it holds for rows whose error is usual; the others, the
*outliers*, have a bit with which they always pass.

A quantizer defines the codes: float32, the least value of each dimension, then SIMD_FLOATS
constants (step, error, radius, least, cut, cut share, limit). A coded query is float32 constants
(scale, shift, beyond) in 64 bytes, then an int16 per value. All bounds are widened by more than the
rounding of float32.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from workers.vector.kernels.arrays import WORD_BITS, Array, aligned, grow, stored_bits
from workers.vector.kernels.distances import SIMD_FLOATS, distance, load
from workers.vector.kernels.integers import SIMD_CODES, product_sum, square_sum
from workers.vector.kernels.jit import inlined, kernel
from workers.vector.kernels.memory import (
    address,
    get_f32,
    get_i64,
    has_bit,
    put_f32,
    put_i16,
    put_i64,
)
from workers.vector.kernels.metrics import HALF, INNER_PRODUCT, SINGLE, SQUARED_L2
from workers.vector.kernels.parallel import over_rows

CODED_DIM_MAX = 4_096  # for more dimensions, sums would not fit into 32 bits
_CODED_BYTES_MIN = 256  # of a vector; shorter ones are read as fast as codes
_LEVELS, _QUERY_LEVELS = 255, 2_047  # of rows; of queries by inner product
_STEP, _ERROR, _RADIUS, _LEAST = 0, 1, 2, 3  # constants of a quantizer, after the least values
_CUT, _CUT_SHARE, _LIMIT = 4, 5, 6  # more: 1 if rows were clipped, their share, outliers' error
_OF_ROW, _OF_CUT, _RADIUS_OF, _SIZE = range(4)  # a row's error, clipped error, code norm, norm
_STATS = 4
_SCALE, _SHIFT, _BEYOND = 0, 1, 2  # constants of a coded query
_HEADER_BYTES = 64
CODED_QUERY_BYTES = _HEADER_BYTES + 2 * CODED_DIM_MAX
_WIDER = np.float32(1.001)
_ROUNDED = np.float32(1e-4)
_INFINITY = np.float32(np.inf)
_SUM_MAX = 2.0**31 - 256
_VALUE_MAX, _STEP_MIN = 1e15, 1e-15  # float32 holds their squares
_LENGTH_MAX = 1e30  # bound of norms; vectors with larger values get no codes
_SAMPLED_ROWS, _BEYOND_SHARE, _MARGIN = 4_096, 0.001, 0.25  # for the choice of the range
_WILD_SHARE, _USUAL = 0.02, 1.5  # outliers' largest share; their error, times the usual one
_RECODED = 0.1  # share of later rows that are clipped, above which a new quantizer is made


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """The codes of rows, and their quantizer."""

    codes: Array  # (rows, code bytes), uint8
    quantizer: Array  # (padded dim + SIMD_FLOATS,), float32
    outliers: Array | None = None  # bit set of rows that always pass; None: there are none

    @property
    def bytes_held(self) -> int:
        """Return the memory of codes and outlier bits in bytes."""
        return self.codes.nbytes + (0 if self.outliers is None else self.outliers.nbytes)

    @property
    def error(self) -> float:
        """Return the largest error of a row's code, without outliers and clipping."""
        return float(self.quantizer[len(self.quantizer) - SIMD_FLOATS + _ERROR])


def encode_rows(vectors: Array, metric: int, *, threads: int = 0) -> Codes | None:
    """Encode `vectors`, float32 or float16 (rows, padded dim); None if codes would not help.

    `metric` is a number of `metrics.py`; `threads` 0: all cores.
    """
    rows, length = vectors.shape
    if not rows or vectors.strides[0] < _CODED_BYTES_MIN or length > CODED_DIM_MAX:
        return None
    low, step = _range(vectors)
    if max(np.abs(low).max(), _LEVELS * step / 2) > _VALUE_MAX:
        return None
    constants = np.zeros(SIMD_FLOATS, np.float32)
    constants[_STEP], constants[_LEAST] = step, np.linalg.norm(low.astype(np.float64))
    return _encode_rows(vectors, np.concatenate([low, constants]), None, metric, threads)


def _range(vectors: Array) -> tuple[Array, float]:
    """Return the least values of codes, float32 (padded dim,), and their step, for most rows."""
    minimum, maximum = (edge.astype(np.float32) for edge in (vectors.min(0), vectors.max(0)))
    sample = vectors[:: max(1, len(vectors) // _SAMPLED_ROWS)].astype(np.float32)
    edge = int(len(sample) * _BEYOND_SHARE)
    places = (edge, len(sample) - 1 - edge)
    low, high = np.partition(sample, places, axis=0)[list(places)].astype(np.float64)
    margin = _MARGIN * (high - low)
    low, high = np.maximum(minimum, low - margin), np.minimum(maximum, high + margin)
    if not (high - low).max() > 0:
        low, high = minimum.astype(np.float64), maximum.astype(np.float64)
    step = max(float((high - low).max()) / _LEVELS, _STEP_MIN)
    centred = (low + high) / 2 - step * _LEVELS / 2
    return np.maximum(minimum, centred).astype(np.float32), step


def extend(base: Codes | None, vectors: Array, metric: int, *, threads: int = 0) -> Codes | None:
    """Encode `vectors`, whose first rows have the codes `base`.

    The quantizer stays, unless many of the other rows are clipped.
    """
    if base is None:
        return encode_rows(vectors, metric, threads=threads)
    return _encode_rows(vectors, base.quantizer, base, metric, threads) or encode_rows(
        vectors, metric, threads=threads
    )


def _encode_rows(
    vectors: Array, quantizer: Array, base: Codes | None, metric: int, threads: int
) -> Codes | None:
    """Encode with the least values and step of a quantizer; None if too many rows are clipped."""
    rows, length = vectors.shape
    first, code_bytes = 0, -(-length // SIMD_CODES) * SIMD_CODES
    if base is None:
        codes = aligned(rows, code_bytes, np.uint8)
    else:
        first, codes = len(base.codes), grow(base.codes, rows)
    codes[first:, length:] = 0
    row_stats = np.zeros((rows - first, _STATS), np.float32)
    if first < rows:
        stored = SINGLE if vectors.dtype == np.float32 else HALF
        over_rows(
            _encode, rows - first, stored_bits(vectors), codes, quantizer, first, stored, row_stats,
            threads=threads,
        )  # fmt: skip
    quantizer = quantizer.copy()
    constants = quantizer[length:]
    was_cut = row_stats[:, _OF_ROW] > row_stats[:, _OF_CUT] * _WIDER
    share = was_cut.mean() if len(row_stats) else 0.0
    if base is None:
        constants[_CUT_SHARE], constants[_LIMIT] = share, _limit(row_stats[:, _OF_ROW])
    elif share > max(_RECODED, 2 * constants[_CUT_SHARE]):
        return None
    outliers = row_stats[:, _OF_ROW] > (constants[_LIMIT] if metric == INNER_PRODUCT else np.inf)
    if metric == SQUARED_L2:
        constants[_CUT] = max(constants[_CUT], was_cut.any())
    _widen(constants, row_stats[~outliers], metric)
    return Codes(codes, quantizer, _outlier_bits(base, first, outliers))


def _limit(errors: Array) -> float:
    """Return the largest error of a row that is no outlier."""
    return float(min(errors.max(initial=0), _USUAL * np.quantile(errors, 1 - _WILD_SHARE)))


def _widen(constants: Array, row_stats: Array, metric: int) -> None:
    """Make a quantizer's constants hold for these rows, too."""
    error, radius, size = row_stats[:, [_OF_ROW, _RADIUS_OF, _SIZE]].max(0, initial=0)
    if metric == SQUARED_L2:
        error = row_stats[:, _OF_CUT].max(initial=0)
    else:
        error += _ROUNDED * size
    constants[_ERROR] = max(constants[_ERROR], error * _WIDER)
    constants[_RADIUS] = max(constants[_RADIUS], radius * _WIDER)


def _outlier_bits(base: Codes | None, first: int, outliers: Array) -> Array | None:
    """Return the bit set of outliers: those of `base`, and `outliers` from row `first` on.

    It shares the memory of `base.outliers`, whose readers never read bits from `first` on.
    """
    before = None if base is None else base.outliers
    if before is None and not outliers.any():
        return None
    words = -(-(first + len(outliers)) // WORD_BITS)
    if before is None:
        bits = aligned(words, 1, np.uint32)
        bits[:] = 0
    else:
        bits = grow(before[:, None], words)
        bits[len(before) :] = 0
        if first % WORD_BITS:
            bits[first // WORD_BITS] &= np.uint32((1 << first % WORD_BITS) - 1)
    rows = first + np.flatnonzero(outliers)
    np.bitwise_or.at(bits[:, 0], rows // WORD_BITS, np.uint32(1) << (rows % WORD_BITS).astype("u4"))
    return bits[:, 0]


@kernel
def _encode(
    begin: int, end: int, vectors: Array, codes: Array, quantizer: Array, first: int, stored: int,
    row_stats: Array,
) -> None:  # fmt: skip
    """Write the codes of some rows, uint8, counted from `first`, and their statistics.

    `vectors` are stored bits, `quantizer` has the least values and the step, and `row_stats` is
    float32 (rows from `first` on, _STATS).
    """
    length = vectors.shape[1]
    exact = np.empty(length, np.float32)
    low, step = np.float32(0), quantizer[length + _STEP]
    for i in range(begin, end):
        load(address(vectors) + (first + i) * vectors.strides[0], address(exact), length, stored)
        size = radius = error = cut = 0.0
        for j in range(length):
            above = exact[j] - quantizer[j]
            level = np.floor(above / step + np.float32(0.5))
            level = min(np.float32(_LEVELS), max(low, level))
            codes[first + i, j] = np.uint8(level)
            near = level * step
            size += np.float64(exact[j]) ** 2
            radius += np.float64(near) ** 2
            error += np.float64(above - near) ** 2
            cut += np.float64(min(np.float32(_LEVELS) * step, max(low, above)) - near) ** 2
        row_stats[i, _SIZE], row_stats[i, _RADIUS_OF] = _length(size), _length(radius)
        row_stats[i, _OF_ROW], row_stats[i, _OF_CUT] = _length(error), _length(cut)


@inlined
def _length(square: Any) -> Any:
    return np.float32(min(np.sqrt(square), _LENGTH_MAX))


@kernel
def encode_query(
    query: int, quantizer: int, length: int, metric: int, out: int, scratch: int
) -> None:
    """Write the code of a query to `out`, the address of CODED_QUERY_BYTES.

    `query`, float32 (length,), `quantizer`, and `scratch`, `length` float32, are addresses, too.
    """
    step, error = get_f32(quantizer, length + _STEP), get_f32(quantizer, length + _ERROR)
    low, high, unit = np.float32(-_LEVELS), np.float32(2 * _LEVELS), step
    floor, ceiling = -_INFINITY, _INFINITY
    if get_f32(quantizer, length + _CUT) != 0:
        low, high = np.float32(0), np.float32(_LEVELS)
        floor, ceiling = np.float32(0), np.float32(_LEVELS) * step
    if metric != SQUARED_L2:
        largest = np.float32(0)
        for i in range(length):
            largest = max(largest, abs(get_f32(query, i)))
        unit = max(largest / np.float32(_QUERY_LEVELS), np.float32(_STEP_MIN))
        low, high = np.float32(-_QUERY_LEVELS), np.float32(_QUERY_LEVELS)
    codes, begins = out + _HEADER_BYTES, np.float32(metric == SQUARED_L2)
    for i in range(length):
        exact = min(ceiling, max(floor, get_f32(query, i) - begins * get_f32(quantizer, i)))
        level = np.floor(min(high, max(low, exact / unit + np.float32(0.5))))
        put_i16(codes, i, np.int16(level))
        put_f32(scratch, i, exact - level * unit)
    for i in range(length, -(-length // SIMD_CODES) * SIMD_CODES):
        put_i16(codes, i, np.int16(0))
    missed = np.sqrt(_square(scratch, length)) * _WIDER
    put_f32(out, _SCALE, step)
    put_f32(out, _BEYOND, error + missed)
    if metric != SQUARED_L2:
        size = np.sqrt(_square(query, length)) * _WIDER
        beyond = size * error + missed * get_f32(quantizer, length + _RADIUS)
        put_f32(out, _SCALE, step * unit)
        put_f32(out, _SHIFT, -distance(query, quantizer, length, INNER_PRODUCT, SINGLE))
        put_f32(out, _BEYOND, beyond + size * get_f32(quantizer, length + _LEAST) * _ROUNDED)


@inlined
def _square(vector: int, length: int) -> Any:
    """Return the sum of squares of the float32 vector at an address."""
    return -distance(vector, vector, length, INNER_PRODUCT, SINGLE)


@inlined
def code_limit(worst: Any, query: int, metric: int) -> Any:
    """Return the largest distance of codes that a row as near as `worst` may have; int64.

    `query` is the address of a coded query.
    """
    scale = np.float64(get_f32(query, _SCALE))
    beyond = np.float64(get_f32(query, _BEYOND))
    if metric == SQUARED_L2:
        reach = (np.sqrt(np.float64(worst)) * (1 + _ROUNDED) + beyond) / scale
        reach *= reach
    else:
        reach = (np.float64(worst) + get_f32(query, _SHIFT) + beyond) / scale
    if not np.isfinite(reach):  # the distances overflow float32, so every row passes
        return np.int64(_SUM_MAX)
    return np.int64(min(_SUM_MAX, max(-_SUM_MAX, reach + 1)))


@inlined
def prefilter(rows: int, count: int, worst: Any, codes: int, code_bytes: int, outliers: int,
           query: int, metric: int) -> int:  # fmt: skip
    """Drop those of `count` rows, int64 at an address, that are farther than `worst`.

    The others move to the front, in order; returns their number. `codes` is the address of uint8,
    `code_bytes` for each row, `outliers` of the bit set of rows that always pass (0: none), `query`
    of a coded query.
    """
    total, limit = 0, code_limit(worst, query, metric)
    if outliers == 0:
        for i in range(count):
            row = get_i64(rows, i)
            put_i64(rows, total, row)  # without a branch, which could not be predicted
            total += code_distance(codes + row * code_bytes, query, code_bytes, metric) <= limit
        return total
    for i in range(count):
        row = get_i64(rows, i)
        put_i64(rows, total, row)
        near = code_distance(codes + row * code_bytes, query, code_bytes, metric) <= limit
        total += near | has_bit(outliers, row)
    return total


@inlined
def code_distance(codes: int, query: int, code_bytes: int, metric: int) -> Any:
    """Return the distance of a row's code, uint8 at an address, from a coded query; int64."""
    if metric == SQUARED_L2:
        return np.int64(square_sum(codes, query + _HEADER_BYTES, code_bytes))
    return -np.int64(product_sum(codes, query + _HEADER_BYTES, code_bytes))
