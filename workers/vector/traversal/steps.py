"""One extend of all active searches: emit tasks, compute distances, merge.

Theory of operation. `advance` makes each active slot take one step after the other. In a step a
slot emits its tasks, the rows whose distances it needs: while seeding, the next rows of its lists;
while walking, the neighbours of its nearest unexpanded entries that it has not met. It drops the
tasks that are too far by their codes (`codes.py`), computes the distances of the others and merges
them into its routing list. Each of these is a pass over all slots, so that memory that one slot has
prefetched arrives while others work. Keys are totally ordered and each slot reads only its own
state, so a search's result does not depend on the rest of the batch, on parking, or on the number
of extends per call. The walk is CAGRA's (see `graph/build.py`) without random entry points, and
with a visited table that fails open: a row whose place another row took is measured again and
dropped as equal in the merge, never lost.

Rows that a filter or a deletion excludes are walked through, but not put into `hit_keys`, the
results. Scanned rows, and copies of a measured row, go only there. If all rows are walked and may
be returned, the routing list has the results and `hit_keys` is not used; if there are copies, it is
filled from the routing list, with the copies, at the end. A slot with a feed takes its next query
by itself, so that a bulk search returns to the interpreter once. `reference.py`, in the tests, is
the same search in NumPy, one query at a time.
"""

from typing import Any

import numpy as np

from workers.vector.kernels.arrays import Array
from workers.vector.kernels.codes import encode_query
from workers.vector.kernels.distances import distance
from workers.vector.kernels.jit import inlined, kernel
from workers.vector.kernels.keys import (
    EMPTY,
    FLAG,
    LIMIT,
    distance_of,
    insert,
    key_of,
    row_of,
)
from workers.vector.kernels.memory import (
    add_i64,
    address,
    get_i64,
    get_u32,
    get_u64,
    prefetch_row,
    put_f32,
    put_i64,
    put_u32,
    put_u64,
)
from workers.vector.traversal import fields
from workers.vector.traversal.hits import drop_chance_hits, has_hit_list, insert_hit, unfold
from workers.vector.traversal.prefilter import CODED_QUERY, prefilter_tasks
from workers.vector.traversal.seeds import AHEAD, seed

_SCATTER, _40 = np.uint64(0x9E3779B97F4A7C15), np.uint64(40)
_ROWS_AHEAD = 12  # rows prefetched of those that passed the codes
_INFINITY = np.float32(np.inf)


@kernel
def advance(
    rows: Array, top: Array, hit_keys: Array, visited: Array, active: Array, count: int,
    tasks: Array, finished: Array, extends_max: int, attention: Array,
) -> tuple[int, int]:  # fmt: skip
    """Make up to `extends_max` extends of the first `count` slots in `active`.

    `rows`, `top`, `hit_keys`, `visited` and `tasks` are those of `CpuSlots`. `active` and
    `finished` are int64, slot numbers; `attention` is int64, shape (1 or more,). Stops after an
    extend in which a slot ended, or after which `attention[0]` is not 0. Returns the number of
    slots in `finished`, and the extends that each active slot made. In all kernels below `f` is the
    address of a slot's row, `keys` of its routing list, `hits` of its `hit_keys`, `table` of its
    visited table and `tasks` of its tasks.
    """
    ended_count, extends = 0, 0
    while extends < extends_max:
        extends += 1
        for i in range(count):
            f, keys, hits, table, work = _places(rows, top, hit_keys, visited, tasks, active[i])
            put_i64(f, fields.TASKS, -1)
            if get_i64(f, fields.STATUS) == fields.FRESH:
                _clear(f, keys, hits, table, work)
            if get_i64(f, fields.STATUS) == fields.WALKING:
                _expand(f, keys, table, work)
            else:
                seed(f, keys, hits, work)
                _end_seeding(f, keys, table)
        for i in range(count):
            f, keys, hits, table, work = _places(rows, top, hit_keys, visited, tasks, active[i])
            if get_i64(f, fields.CODES) and get_i64(f, fields.TASKS) > 0:
                _prefilter(f, keys, hits, work)
        for i in range(count):
            f, keys, hits, table, work = _places(rows, top, hit_keys, visited, tasks, active[i])
            if get_i64(f, fields.TASKS) >= 0:
                _merge(f, keys, hits, work)
            if get_i64(f, fields.STATUS) == fields.DONE:
                if get_i64(f, fields.CHAIN) and get_i64(f, fields.SCREENED) == 0:
                    unfold(f, keys, hits)
                drop_chance_hits(f, keys, hits)
                if not _take_next_query(f, keys, hits):
                    finished[ended_count] = active[i]
                    ended_count += 1
        if ended_count > 0 or attention[0] != 0:
            break
    return ended_count, extends


@inlined
def _places(rows: Array, top: Array, hits: Array, visited: Array, tasks: Array, slot: int) -> Any:
    """Return the addresses of a slot's row, and of its row of each other array."""
    return (
        address(rows) + slot * rows.strides[0], address(top) + slot * top.strides[0],
        address(hits) + slot * hits.strides[0], address(visited) + slot * visited.strides[0],
        address(tasks) + slot * tasks.strides[0],
    )  # fmt: skip


@kernel
def _clear(f: int, keys: int, hits: int, table: int, tasks: int) -> None:
    """Prepare a FRESH slot for its first step."""
    for i in range(get_i64(f, fields.TOP_M)):
        put_u64(keys, i, EMPTY)
    for i in range(get_i64(f, fields.K)):
        put_u64(hits, i, EMPTY)
    for i in range((get_i64(f, fields.HASH_MASK) + 1) >> 1):
        put_u64(table, i, EMPTY)
    for field in range(fields.NEXT, fields.LOOSE_DONE + 1):
        put_i64(f, field, 0)
    put_i64(f, fields.STATUS, fields.SEEDING)
    if get_i64(f, fields.CODES):
        encode_query(
            get_i64(f, fields.QUERY), get_i64(f, fields.QUANTIZER), get_i64(f, fields.LENGTH),
            get_i64(f, fields.METRIC), tasks + CODED_QUERY, tasks,
        )  # fmt: skip


@kernel
def _take_next_query(f: int, keys: int, hits: int) -> bool:
    """Write the slot's result to its feed and take the next query; return False without one."""
    feed, k = get_i64(f, fields.FEED), get_i64(f, fields.K)
    if feed == 0:
        return False
    source, limit = keys, get_i64(f, fields.TOP_M)
    if has_hit_list(f):
        source, limit = hits, k
    place = get_i64(f, fields.FEED_PLACE) * k
    rows, distances = get_i64(feed, fields.FEED_ROWS), get_i64(feed, fields.FEED_DISTANCES)
    for i in range(k):
        key = get_u64(source, i) if i < limit else EMPTY
        if key >= LIMIT:
            put_i64(rows, place + i, -1)
            put_f32(distances, place + i, _INFINITY)
        else:
            put_i64(rows, place + i, row_of(key))
            put_f32(distances, place + i, distance_of(key))
    add_i64(feed, fields.FEED_EXTENDS, get_i64(f, fields.EXTENDS))
    add_i64(feed, fields.FEED_COMPUTED, get_i64(f, fields.DISTANCES))
    place = get_i64(feed, fields.FEED_NEXT)
    if place >= get_i64(feed, fields.FEED_LAST):
        return False
    put_i64(feed, fields.FEED_NEXT, place + 1)
    put_i64(f, fields.FEED_PLACE, place)
    offset = place * get_i64(feed, fields.FEED_QUERY_BYTES)
    put_i64(f, fields.QUERY, get_i64(feed, fields.FEED_QUERIES) + offset)
    put_i64(f, fields.STATUS, fields.FRESH)
    return True


@kernel
def _end_seeding(f: int, keys: int, table: int) -> None:
    """Make the slot walk, or end it, if all of its lists are measured."""
    if get_i64(f, fields.LIST_COUNT) > 0:
        if get_i64(f, fields.LIST_DONE) >= get_i64(f, fields.LIST_COUNT):
            put_i64(f, fields.STATUS, fields.DONE)
        return
    loose = get_i64(f, fields.LOOSE_LAST) - get_i64(f, fields.LOOSE_FIRST)
    if (
        get_i64(f, fields.WARM_DONE) < get_i64(f, fields.WARM_COUNT)
        or get_i64(f, fields.REPS_DONE) < get_i64(f, fields.REPS_COUNT)
        or get_i64(f, fields.LOOSE_DONE) < loose
    ):
        return
    if get_i64(f, fields.WHOLE):
        put_i64(f, fields.STATUS, fields.DONE)
        return
    mask, m = np.uint64(get_i64(f, fields.HASH_MASK)), get_i64(f, fields.TOP_M)
    for place in range(m):  # the walk has met these; rows that fell out of the list may come again
        key = get_u64(keys, place)
        if key < LIMIT:
            _visit(table, mask, np.uint32(row_of(key)))
    _settle(f, keys, 0, m)
    if get_i64(f, fields.STATUS) != fields.DONE:
        put_i64(f, fields.STATUS, fields.WALKING)


@kernel
def _expand(f: int, keys: int, table: int, tasks: int) -> None:
    """Expand the nearest unexpanded entries: their neighbours that are new become tasks."""
    m, width, degree = (
        get_i64(f, fields.TOP_M), get_i64(f, fields.WIDTH), get_i64(f, fields.DEGREE)
    )  # fmt: skip
    graph, place, mask = (
        get_i64(f, fields.GRAPH), get_i64(f, fields.NEXT), get_i64(f, fields.HASH_MASK)
    )  # fmt: skip
    total = 0
    codes, code_bytes = get_i64(f, fields.CODES), get_i64(f, fields.CODE_BYTES)
    while place < m:
        key = get_u64(keys, place)
        if key >= LIMIT:
            break
        if not key & FLAG:
            if width == 0:  # the next one to expand, unless a nearer one is found in this step
                prefetch_row(graph + 4 * degree * row_of(key), 4 * degree)
                break
            put_u64(keys, place, key | FLAG)
            width -= 1
            edges = graph + 4 * degree * row_of(key)
            for edge in range(degree):
                row = get_u32(edges, edge)
                if row == row_of(key):  # the row itself fills the unused places at the end
                    break
                put_i64(tasks, total, np.int64(row))
                prefetch_row(codes + np.int64(row) * code_bytes, code_bytes)  # 0 bytes: no codes
                total += _visit(table, np.uint64(mask), row)
        place += 1
    put_i64(f, fields.PLACE, place)
    put_i64(f, fields.TASKS, total)
    add_i64(f, fields.EXTENDS, 1)
    add_i64(f, fields.DISTANCES, total)
    if not codes:
        _request(f, tasks, min(total, AHEAD))


@inlined
def _request(f: int, tasks: int, count: int) -> None:
    """Prefetch the vectors of the first tasks."""
    vectors, row_bytes = get_i64(f, fields.VECTORS), get_i64(f, fields.ROW_BYTES)
    for i in range(count):
        prefetch_row(vectors + get_i64(tasks, i) * row_bytes, row_bytes)


@kernel
def _prefilter(f: int, keys: int, hits: int, tasks: int) -> None:
    """Drop the tasks whose codes show that no list would take them."""
    m, total = get_i64(f, fields.TOP_M), get_i64(f, fields.TASKS)
    total = prefilter_tasks(f, keys, hits, m, tasks, total, fields.CODES)
    put_i64(f, fields.TASKS, total)
    _request(f, tasks, min(total, _ROWS_AHEAD))


@kernel
def _merge(f: int, keys: int, hits: int, tasks: int) -> None:
    """Measure the tasks, and merge them into the lists."""
    m, k, total = get_i64(f, fields.TOP_M), get_i64(f, fields.K), get_i64(f, fields.TASKS)
    vectors, row_bytes = get_i64(f, fields.VECTORS), get_i64(f, fields.ROW_BYTES)
    query, length = get_i64(f, fields.QUERY), get_i64(f, fields.LENGTH)
    metric, stored = get_i64(f, fields.METRIC), get_i64(f, fields.STORED)
    screened = get_i64(f, fields.SCREENED) != 0
    lowest = m
    for i in range(total):
        if i + AHEAD < total:
            prefetch_row(vectors + get_i64(tasks, i + AHEAD) * row_bytes, row_bytes)
        row = get_i64(tasks, i)
        key = key_of(distance(vectors + row * row_bytes, query, length, metric, stored), row)
        if screened:
            insert_hit(f, hits, k, key, get_i64(f, fields.CHAIN))
        at = insert(keys, m, key)
        if at >= 0:
            lowest = min(lowest, at)
    put_i64(f, fields.STABLE, 0 if lowest < m else get_i64(f, fields.STABLE) + 1)
    patience = get_i64(f, fields.PATIENCE)
    if patience > 0 and get_i64(f, fields.STABLE) >= patience:
        put_i64(f, fields.STATUS, fields.DONE)
        return
    _settle(f, keys, min(get_i64(f, fields.PLACE), lowest), m)


@inlined
def _visit(table: int, mask: Any, row: Any) -> bool:
    """Put a row into the visited table; return False if it was there."""
    place = np.intp(((np.uint64(row) * _SCATTER) >> _40) & mask)
    new: bool = get_u32(table, place) != row
    put_u32(table, place, row)
    return new


@inlined
def _settle(f: int, keys: int, place: int, m: int) -> None:
    """Find the next entry to expand; without one the search is DONE."""
    while place < m and get_u64(keys, place) < LIMIT and get_u64(keys, place) & FLAG:
        place += 1
    put_i64(f, fields.NEXT, place)
    if place >= m or get_u64(keys, place) >= LIMIT:
        put_i64(f, fields.STATUS, fields.DONE)
        return
    edges_bytes = 4 * get_i64(f, fields.DEGREE)
    nearest = edges_bytes * row_of(get_u64(keys, place))
    prefetch_row(get_i64(f, fields.GRAPH) + nearest, edges_bytes)
