"""Seeds a search: measures entry points, warm starts and scanned rows, list by list.

`steps.py` calls this. `f` is the address of a slot's row, `keys` of its routing list, `hits` of its
`hit_keys` and `tasks` of its tasks.
"""

from typing import Any

from workers.vector.kernels.distances import distance
from workers.vector.kernels.jit import inlined, kernel
from workers.vector.kernels.keys import insert, key_of
from workers.vector.kernels.memory import add_i64, get_f32, get_i64, prefetch_row, put_i64
from workers.vector.kernels.panels import NEAREST_MAX, PANEL_ROWS, choose, measure
from workers.vector.traversal import fields
from workers.vector.traversal.hits import insert_hit
from workers.vector.traversal.prefilter import prefilter_tasks
from workers.vector.traversal.slots import ROWS_A_STEP

AHEAD = 6  # rows that are prefetched


@kernel
def seed(f: int, keys: int, hits: int, tasks: int) -> None:
    """Measure the next rows: of the filter's list, or warm start, entry points, loose rows."""
    lists, warm = get_i64(f, fields.LIST_COUNT), get_i64(f, fields.WARM_COUNT)
    if lists > 0:
        _scan(f, keys, hits, get_i64(f, fields.LIST), lists, fields.LIST_DONE, 0)
    elif get_i64(f, fields.WARM_DONE) < warm:
        m = get_i64(f, fields.TOP_M)
        _scan(f, keys, hits, get_i64(f, fields.WARM), warm, fields.WARM_DONE, m)
    elif get_i64(f, fields.REPS_DONE) < get_i64(f, fields.REPS_COUNT):
        _enter(f, keys, hits, tasks)
    else:
        loose = get_i64(f, fields.LOOSE_LAST) - get_i64(f, fields.LOOSE_FIRST)
        _scan(f, keys, hits, 0, loose, fields.LOOSE_DONE, 0)
    add_i64(f, fields.EXTENDS, 1)


@inlined
def _scan(f: int, keys: int, hits: int, listed: int, last: int, done_field: int, size: int) -> None:
    """Measure the next rows of a list of `last` rows, int64 at `listed`; 0: rows without edges."""
    vectors, row_bytes = get_i64(f, fields.VECTORS), get_i64(f, fields.ROW_BYTES)
    first, offset = get_i64(f, done_field), get_i64(f, fields.LOOSE_FIRST)
    last = min(last, first + ROWS_A_STEP)
    query, length = get_i64(f, fields.QUERY), get_i64(f, fields.LENGTH)
    metric, stored = get_i64(f, fields.METRIC), get_i64(f, fields.STORED)
    for i in range(first, last):
        row = get_i64(listed, i) if listed else offset + i
        if listed and i + AHEAD < last:
            prefetch_row(vectors + get_i64(listed, i + AHEAD) * row_bytes, row_bytes)
        key = key_of(distance(vectors + row * row_bytes, query, length, metric, stored), row)
        _insert(f, keys, hits, size, key)
    put_i64(f, done_field, last)
    add_i64(f, fields.DISTANCES, last - first)


@inlined
def _enter(f: int, keys: int, hits: int, tasks: int) -> None:
    """Measure the next entry points, whose vectors are in panels or contiguous."""
    reps, first = get_i64(f, fields.REPS), get_i64(f, fields.REPS_DONE)
    last = min(get_i64(f, fields.REPS_COUNT), first + ROWS_A_STEP)
    size, total = max(get_i64(f, fields.ENTRIES), get_i64(f, fields.WARM_COUNT)), last - first
    query, length = get_i64(f, fields.QUERY), get_i64(f, fields.LENGTH)
    metric, stored = get_i64(f, fields.METRIC), get_i64(f, fields.STORED)
    panels = get_i64(f, fields.REPS_PANELS)
    put_i64(f, fields.REPS_DONE, last)
    add_i64(f, fields.DISTANCES, total)
    if panels:
        dims = get_i64(f, fields.REPS_DIMS)
        at = panels + 4 * dims * first  # a step begins with a panel
        measure(at, (total + PANEL_ROWS - 1) // PANEL_ROWS, query, dims, metric, tasks)
        if (
            size <= NEAREST_MAX
            and get_i64(f, fields.SCREENED) == 0
            and get_i64(f, fields.WARM_COUNT) == 0
        ):
            choose(tasks, total, reps + 8 * first, keys, size)
            return
        for i in range(total):
            key = key_of(get_f32(tasks, i), get_i64(reps, first + i))
            _insert(f, keys, hits, size, key)
        return
    vectors, row_bytes = get_i64(f, fields.REPS_VECTORS), get_i64(f, fields.ROW_BYTES)
    for i in range(total):
        put_i64(tasks, i, first + i)
    if get_i64(f, fields.REPS_CODES):
        total = prefilter_tasks(f, keys, hits, size, tasks, total, fields.REPS_CODES)
    for task in range(total):
        i = get_i64(tasks, task)
        dist = distance(vectors + i * row_bytes, query, length, metric, stored)
        _insert(f, keys, hits, size, key_of(dist, get_i64(reps, i)))


@inlined
def _insert(f: int, keys: int, hits: int, size: int, key: Any) -> None:
    """Insert a row into the lists that it is near enough for; `size` 0: only into the hits."""
    if get_i64(f, fields.SCREENED):
        k = get_i64(f, fields.K)
        insert_hit(f, hits, k, key, get_i64(f, fields.CHAIN) if size > 0 else 0)
    if size > 0:
        insert(keys, size, key)
