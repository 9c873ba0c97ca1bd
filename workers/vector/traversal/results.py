"""Reads the results of ended slots, in one kernel call for all of them."""

from collections.abc import Sequence

import numpy as np

from workers.vector.kernels.arrays import Array, address_of
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.keys import LIMIT, distance_of, row_of
from workers.vector.kernels.memory import address, get_i64, get_u64, put_f32, put_i64, put_u64
from workers.vector.traversal import fields
from workers.vector.traversal.hits import has_hit_list
from workers.vector.traversal.slots import SlotRows

# Of one search: rows, nearest first; distances as kernels compute them; keys of the whole routing
# list; extends; distances computed; 1 if rows were scanned without a walk. The arrays are slices of
# those of all slots that were read together.
SlotHits = tuple[Array, Array, Array, int, int, int]

_INT64, _FLOAT32, _UINT64 = np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.uint64)
_COLUMNS = 7  # of a slot's summary by `_read`


class SlotReader:
    """Reads the results of several slots at a time."""

    def __init__(self, slots: SlotRows) -> None:
        self._rows = address_of(slots.fields), slots.fields.strides[0]
        self._top = address_of(slots.top), slots.top.strides[0]
        self._hit_keys = address_of(slots.hit_keys), slots.hit_keys.strides[0]
        self.read([0])  # compile here, not in a caller's event loop

    def read(self, ended_slots: Sequence[int]) -> list[SlotHits | None]:
        """Return the slots' results and clear their rows. A walk with fewer hits than WANTED
        gives None, and its row stays unchanged."""
        slots = np.array(ended_slots, _INT64)
        hits, entries = _count_space(*self._rows, slots)
        rows, distances = np.empty(hits, _INT64), np.empty(hits, _FLOAT32)
        keys, summary = np.empty(entries, _UINT64), np.empty((len(slots), _COLUMNS), _INT64)
        _read_all(*self._rows, *self._top, *self._hit_keys, slots, rows, distances, keys, summary)
        return [
            (rows[first:last], distances[first:last], keys[begin:end], extends, computed, is_scan)
            if is_scan >= 0 else None
            for first, last, begin, end, extends, computed, is_scan in summary.tolist()
        ]  # fmt: skip


@kernel
def _count_space(base: int, row_bytes: int, slots: Array) -> tuple[int, int]:
    """Return how many hits and keys the slots can have in total; `base` is their rows' address."""
    hits, entries = 0, 0
    for i in range(len(slots)):
        f = base + slots[i] * row_bytes
        hits += get_i64(f, fields.K)
        entries += get_i64(f, fields.TOP_M)
    return hits, entries


@kernel
def _read_all(
    base: int, row_bytes: int, top: int, top_bytes: int, hits: int, hits_bytes: int, slots: Array,
    rows: Array, distances: Array, keys: Array, summary: Array,
) -> None:  # fmt: skip
    """Copy out the results of slots, from addresses and strides of their rows and lists.

    `summary` is int64, shape (slots, _COLUMNS): the start and end of a slot's hits in `rows` and
    `distances`, those of its keys in `keys`, then the other results of `_read`.
    """
    hit, key = 0, 0
    for i in range(len(slots)):
        slot, t = slots[i], address(summary) + i * summary.strides[0]
        put_i64(t, 0, hit)
        put_i64(t, 2, key)
        f, lists = base + slot * row_bytes, top + slot * top_bytes
        _read(f, lists, hits + slot * hits_bytes, t, rows, distances, keys)
        hit, key = get_i64(t, 1), get_i64(t, 3)


@kernel
def _read(
    f: int, top: int, hit_keys: int, t: int, rows: Array, distances: Array, keys: Array
) -> None:  # fmt: skip
    """Copy out the hits of one slot, and clear its row unless there are too few hits.

    Addresses of the slot's row, its routing list and its `hit_keys` (uint64), and `t` of seven
    int64: the first and third are the places to write to; the others get the ends, extends,
    distances, and 1 if rows were scanned, 0 if not, -1 if there are too few hits.
    """
    first, begin = get_i64(t, 0), get_i64(t, 2)
    entries, k, hits = 0, get_i64(f, fields.K), 0
    while entries < get_i64(f, fields.TOP_M) and get_u64(top, entries) < LIMIT:
        put_u64(address(keys), begin + entries, get_u64(top, entries))
        entries += 1
    source, limit = (hit_keys, k) if has_hit_list(f) else (top, min(k, entries))
    while hits < limit and get_u64(source, hits) < LIMIT:
        put_i64(address(rows), first + hits, row_of(get_u64(source, hits)))
        put_f32(address(distances), first + hits, distance_of(get_u64(source, hits)))
        hits += 1
    is_scan = 1 if get_i64(f, fields.REPS_COUNT) == 0 or get_i64(f, fields.WHOLE) else 0
    put_i64(t, 1, first + hits)
    put_i64(t, 3, begin + entries)
    put_i64(t, 4, get_i64(f, fields.EXTENDS))
    put_i64(t, 5, get_i64(f, fields.DISTANCES))
    put_i64(t, 6, is_scan if is_scan or hits >= get_i64(f, fields.WANTED) else -1)
    if get_i64(t, 6) >= 0:
        for field in range(fields.COUNT):
            put_i64(f, field, 0)  # clears all addresses, too
