"""Takes from a slot that is done what it has found, in one kernel call; NumPy would need many."""

import numpy as np

from workers.search.kernels.arrays import Array, row_addresses
from workers.search.kernels.jit import kernel
from workers.search.kernels.keys import LIMIT, distance_of, row_of
from workers.search.kernels.memory import address, get_i64, get_u64, put_f32, put_i64, put_u64
from workers.search.walk import fields
from workers.search.walk.slots import SlotRows

# Rows, nearest first, and distances as kernels give them; keys of the whole routing list; extends;
# distances computed; 1 where rows were scanned and nothing was walked. All of one search.
SlotHits = tuple[Array, Array, Array, int, int, int]

_INT64, _FLOAT32, _UINT64 = np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.uint64)


class SlotReader:
    """Reads some slots, one at a time."""

    def __init__(self, slots: SlotRows) -> None:
        counts = np.zeros(5, np.int64)
        self._counts = counts.data
        lists = (row_addresses(slots.top), row_addresses(slots.found))
        ours = row_addresses(counts[None]) * slots.count
        self._places = list(zip(slots.addresses, *lists, ours, strict=True))
        self.read(0, 1, 1, 0)  # compile here, not in somebody's event loop

    def read(self, slot: int, k: int, top_m: int, wanted: int) -> SlotHits | None:
        """What a slot found, which is free then; None, and as it was, where a walk found fewer hits
        than are `wanted`. `k` and `top_m` are at least the slot's."""
        rows, distances, keys = np.empty(k, _INT64), np.empty(k, _FLOAT32), np.empty(top_m, _UINT64)
        if not _read(*self._places[slot], wanted, rows, distances, keys):
            return None
        hits, entries, extends, computed, is_scan = self._counts.tolist()
        if hits < k:
            rows, distances = rows[:hits], distances[:hits]
        if entries < top_m:
            keys = keys[:entries]
        return rows, distances, keys, extends, computed, is_scan


@kernel
def _read(
    f: int, top: int, found: int, counts: int, wanted: int, rows: Array, distances: Array,
    keys: Array,
) -> bool:  # fmt: skip
    """Whether there are hits enough; then they are copied out, and the slot's row is cleared.

    Addresses of the slot's row, its routing list and its `found` (uint64), and of five int64 where
    hits, entries, extends, distances and whether rows were scanned go.
    """
    entries, k, hits = 0, get_i64(f, fields.K), 0
    while entries < get_i64(f, fields.TOP_M) and get_u64(top, entries) < LIMIT:
        put_u64(address(keys), entries, get_u64(top, entries))
        entries += 1
    source, most = (found, k) if get_i64(f, fields.SCREENED) else (top, min(k, entries))
    while hits < most and get_u64(source, hits) < LIMIT:
        put_i64(address(rows), hits, row_of(get_u64(source, hits)))
        put_f32(address(distances), hits, distance_of(get_u64(source, hits)))
        hits += 1
    is_scan = get_i64(f, fields.REPS_COUNT) == 0
    if hits < wanted and not is_scan:
        return False
    put_i64(counts, 0, hits)
    put_i64(counts, 1, entries)
    put_i64(counts, 2, get_i64(f, fields.EXTENDS))
    put_i64(counts, 3, get_i64(f, fields.DISTANCES))
    put_i64(counts, 4, 1 if is_scan else 0)
    for field in range(fields.COUNT):
        put_i64(f, field, 0)  # it points to nothing any more
    return True
