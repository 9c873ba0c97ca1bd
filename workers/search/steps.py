"""One extend of all active searches: emit tasks, compute distances, merge.

Theory of operation. `advance` makes every active slot take one step at a time. First each slot
emits its tasks, the rows whose distances it needs: while seeding, the next rows of its lists; while
walking, those neighbours of its nearest unexpanded entries that it has not met. Then one loop
computes all tasks' distances, whosever they are. Then each slot merges its own into its top list.
Keys are totally ordered and each slot reads only its own state, so a search's result does not
depend on what else is in the batch, on parking, or on how many extends a call makes. The walk is
CAGRA's (see `graph.py`) without random entry points, with a visited table that fails open: a row
that finds no place is computed again and dropped as equal in the merge, never lost.

Rows that a filter or a tombstone excludes are walked through, and kept out of `found`, the list of
results. `reference.py` is the same search in NumPy, one at a time.
"""

from typing import Any

import numpy as np

from workers.search.compiled import inlined, kernel
from workers.search.distances import distance
from workers.search.keys import EMPTY, FLAG, insert, key_of, row_of
from workers.search.memory import (
    address,
    get_f32,
    get_i64,
    get_u32,
    get_u64,
    prefetch_row,
    put_f32,
    put_i64,
    put_u32,
    put_u64,
)  # fmt: skip
from workers.search.slots import ROWS_A_STEP, Field, Status

Array = np.ndarray[Any, Any]

_UNUSED = np.uint32(0xFFFFFFFF)
_SCATTER, _40, _ONE = np.uint64(0x9E3779B97F4A7C15), np.uint64(40), np.uint64(1)
_LIMIT = EMPTY - FLAG
_AHEAD = 6

# Plain integers, which kernels take as constants.
_STATUS, _TOP_M, _WIDTH, _K = (
    Field.STATUS.value,
    Field.TOP_M.value,
    Field.WIDTH.value,
    Field.K.value,
)
_PATIENCE, _ENTRIES, _MASK = Field.PATIENCE.value, Field.ENTRIES.value, Field.HASH_MASK.value
_NEXT, _STABLE, _EXTENDS = Field.NEXT.value, Field.STABLE.value, Field.EXTENDS.value
_DISTANCES, _LIST_DONE, _WARM_DONE = (
    Field.DISTANCES.value,
    Field.LIST_DONE.value,
    Field.WARM_DONE.value,
)
_REPS_DONE, _LOOSE_DONE = Field.REPS_DONE.value, Field.LOOSE_DONE.value
_VECTORS, _ROW_BYTES, _LENGTH = Field.VECTORS.value, Field.ROW_BYTES.value, Field.LENGTH.value
_METRIC, _STORED, _GRAPH, _DEGREE = (
    Field.METRIC.value,
    Field.STORED.value,
    Field.GRAPH.value,
    Field.DEGREE.value,
)
_ALIVE, _ALLOWED = Field.ALIVE.value, Field.ALLOWED.value
_SCREENED = Field.SCREENED.value
_LOOSE_FIRST, _LOOSE_LAST = Field.LOOSE_FIRST.value, Field.LOOSE_LAST.value
_REPS, _REPS_COUNT, _LIST, _LIST_COUNT = (
    Field.REPS.value,
    Field.REPS_COUNT.value,
    Field.LIST.value,
    Field.LIST_COUNT.value,
)
_WARM, _WARM_COUNT = Field.WARM.value, Field.WARM_COUNT.value
_SEEDING, _WALKING, _DONE = Status.SEEDING.value, Status.WALKING.value, Status.DONE.value
_FROM_LIST, _FROM_WARM, _FROM_REPS, _FROM_LOOSE, _FROM_GRAPH = range(5)


@kernel
def advance(
    fields: Array, queries: Array, top: Array, found: Array, visited: Array, active: Array,
    tasks: Array, results: Array, spans: Array, finished: Array, extends_max: int,
    attention: Array,
) -> int:  # fmt: skip
    """Up to `extends_max` extends of the active slots; how many are in `finished` now.

    Returns early after an extend in which a search ended, or at which `attention[0]` is set.
    `tasks` (int64) and `results` (float32) have room for the tasks of all slots; `spans` (int64,
    shape (slots, 3)) holds where each slot's tasks begin and end and where they come from.
    """
    ended = 0
    for _ in range(extends_max):
        total = 0
        for slot in active:
            spans[slot, 0] = total
            total = _emit(slot, fields, top, visited, tasks, spans, total)
            spans[slot, 1] = total
        for slot in active:
            _measure(slot, fields, queries, tasks, results, spans[slot, 0], spans[slot, 1])
        for slot in active:
            _merge(slot, fields, top, found, visited, tasks, results, spans)
            if fields[slot, _STATUS] == _DONE:
                finished[ended] = slot
                ended += 1
        if ended or attention[0]:
            break
    return ended


@inlined
def _emit(
    slot: int, fields: Array, top: Array, visited: Array, tasks: Array, spans: Array, total: int
) -> int:
    """Append the slot's tasks; the new number of all tasks."""
    if fields[slot, _STATUS] == _WALKING:
        spans[slot, 2] = _FROM_GRAPH
        return _expand(slot, fields, top, visited, tasks, total)
    if fields[slot, _STATUS] != _SEEDING:
        return total
    if fields[slot, _LIST_DONE] < fields[slot, _LIST_COUNT]:
        spans[slot, 2] = _FROM_LIST
        return _listed(slot, fields, _LIST, _LIST_COUNT, _LIST_DONE, tasks, total)
    if fields[slot, _WARM_DONE] < fields[slot, _WARM_COUNT]:
        spans[slot, 2] = _FROM_WARM
        return _listed(slot, fields, _WARM, _WARM_COUNT, _WARM_DONE, tasks, total)
    if fields[slot, _REPS_DONE] < fields[slot, _REPS_COUNT]:
        spans[slot, 2] = _FROM_REPS
        return _listed(slot, fields, _REPS, _REPS_COUNT, _REPS_DONE, tasks, total)
    spans[slot, 2] = _FROM_LOOSE
    first = fields[slot, _LOOSE_FIRST] + fields[slot, _LOOSE_DONE]
    last = min(fields[slot, _LOOSE_LAST], first + ROWS_A_STEP)
    for row in range(first, last):
        tasks[total] = row
        total += 1
    fields[slot, _LOOSE_DONE] += max(0, last - first)
    return total


@inlined
def _listed(
    slot: int, fields: Array, where: int, count: int, done: int, tasks: Array, total: int
) -> int:
    """The next rows of a list."""
    first, rows = fields[slot, done], fields[slot, where]
    last = min(fields[slot, count], first + ROWS_A_STEP)
    for i in range(first, last):
        tasks[total] = get_i64(rows, i)
        total += 1
    fields[slot, done] = last
    return total


@inlined
def _expand(slot: int, fields: Array, top: Array, visited: Array, tasks: Array, total: int) -> int:
    """Mark the nearest unexpanded entries as expanded; their neighbours that are new are tasks."""
    width, m, degree = fields[slot, _WIDTH], fields[slot, _TOP_M], fields[slot, _DEGREE]
    graph, place, mask = fields[slot, _GRAPH], fields[slot, _NEXT], np.uint64(fields[slot, _MASK])
    seen = address(visited) + slot * visited.strides[0]
    keys, out = address(top) + slot * top.strides[0], address(tasks)
    keeps = fields[slot, _DISTANCES] < fields[slot, _MASK] >> 1
    while width > 0 and place < m:
        key = get_u64(keys, place)
        if key >= _LIMIT:
            break
        if not key & FLAG:
            put_u64(keys, place, key | FLAG)
            width -= 1
            edges = graph + 4 * degree * row_of(key)
            for edge in range(degree):
                row = get_u32(edges, edge)
                if _visit(seen, mask, row, keeps):
                    put_i64(out, total, np.int64(row))
                    total += 1
        place += 1
    fields[slot, _NEXT] = place
    return total


@inlined
def _visit(seen: int, mask: Any, row: Any, keeps: bool) -> bool:
    """Whether a row is met for the first time, as far as the table tells; kept if `keeps`."""
    place = ((np.uint64(row) * _SCATTER) >> _40) & mask
    while True:
        held = get_u32(seen, np.intp(place))
        if held == row:
            return False
        if held == _UNUSED:
            break
        place = (place + _ONE) & mask
    if keeps:
        put_u32(seen, np.intp(place), row)
    return True


@inlined
def _meet(seen: int, slot: int, fields: Array, top: Array) -> None:
    """The walk has met what it begins with; what fell out of the list may come again."""
    mask = np.uint64(fields[slot, _MASK])
    for place in range(fields[slot, _TOP_M]):
        key = top[slot, place]
        if key < _LIMIT:
            _visit(seen, mask, np.uint32(row_of(key)), True)


@inlined
def _measure(
    slot: int, fields: Array, queries: Array, tasks: Array, results: Array, first: int, last: int
) -> None:
    vectors, row_bytes = fields[slot, _VECTORS], fields[slot, _ROW_BYTES]
    query = address(queries) + slot * queries.strides[0]
    length, metric, stored = fields[slot, _LENGTH], fields[slot, _METRIC], fields[slot, _STORED]
    rows, out = address(tasks), address(results)
    for i in range(first, min(last, first + _AHEAD)):
        prefetch_row(vectors + get_i64(rows, i) * row_bytes, row_bytes)
    for i in range(first, last):
        if i + _AHEAD < last:
            prefetch_row(vectors + get_i64(rows, i + _AHEAD) * row_bytes, row_bytes)
        at = vectors + get_i64(rows, i) * row_bytes
        put_f32(out, i, distance(at, query, length, metric, stored))


@inlined
def _merge(
    slot: int, fields: Array, top: Array, found: Array, visited: Array, tasks: Array,
    results: Array, spans: Array,
) -> None:  # fmt: skip
    """Take the slot's distances into its lists, and decide whether it goes on."""
    if fields[slot, _STATUS] != _SEEDING and fields[slot, _STATUS] != _WALKING:
        return
    m, k, source = fields[slot, _TOP_M], fields[slot, _K], spans[slot, 2]
    keys, hits = address(top) + slot * top.strides[0], address(found) + slot * found.strides[0]
    entries = max(fields[slot, _ENTRIES], fields[slot, _WARM_COUNT])
    room = entries if source == _FROM_REPS else m
    screened, rows, measured = fields[slot, _SCREENED] != 0, address(tasks), address(results)
    lowest = m
    for i in range(spans[slot, 0], spans[slot, 1]):
        row = get_i64(rows, i)
        key = key_of(get_f32(measured, i), row)
        if screened and _may_return(slot, fields, row):
            insert(hits, k, key)
        if source == _FROM_LIST:
            continue
        place = insert(keys, room, key)
        if place >= 0:
            if source == _FROM_LOOSE:  # it has no edges to expand
                put_u64(keys, place, key | FLAG)
            lowest = min(lowest, place)
    fields[slot, _NEXT] = min(fields[slot, _NEXT], lowest)
    fields[slot, _EXTENDS] += 1
    fields[slot, _DISTANCES] += spans[slot, 1] - spans[slot, 0]
    fields[slot, _STABLE] = 0 if lowest < m else fields[slot, _STABLE] + 1
    _settle(slot, fields, top, visited)


@inlined
def _settle(slot: int, fields: Array, top: Array, visited: Array) -> None:
    """Whether the slot seeds on, walks, or is done."""
    if fields[slot, _STATUS] == _SEEDING:
        if fields[slot, _LIST_COUNT] > 0:
            if fields[slot, _LIST_DONE] >= fields[slot, _LIST_COUNT]:
                fields[slot, _STATUS] = _DONE
            return
        loose = fields[slot, _LOOSE_FIRST] + fields[slot, _LOOSE_DONE]
        if (
            fields[slot, _WARM_DONE] < fields[slot, _WARM_COUNT]
            or fields[slot, _REPS_DONE] < fields[slot, _REPS_COUNT]
            or loose < fields[slot, _LOOSE_LAST]
        ):
            return
        fields[slot, _STATUS], fields[slot, _STABLE] = _WALKING, 0
        _meet(address(visited) + slot * visited.strides[0], slot, fields, top)
    patience = fields[slot, _PATIENCE]
    if patience > 0 and fields[slot, _STABLE] >= patience:
        fields[slot, _STATUS] = _DONE
        return
    place, m = fields[slot, _NEXT], fields[slot, _TOP_M]
    while place < m and top[slot, place] < _LIMIT and top[slot, place] & FLAG:
        place += 1
    fields[slot, _NEXT] = place
    if place >= m or top[slot, place] >= _LIMIT:
        fields[slot, _STATUS] = _DONE


@inlined
def _may_return(slot: int, fields: Array, row: int) -> bool:
    alive, allowed = fields[slot, _ALIVE], fields[slot, _ALLOWED]
    if alive != 0 and not _has_bit(alive, row):
        return False
    return allowed == 0 or _has_bit(allowed, row)


@inlined
def _has_bit(bits: int, row: int) -> bool:
    bit: bool = (get_u32(bits, row >> 5) >> np.uint32(row & 31)) & np.uint32(1) != np.uint32(0)
    return bit
