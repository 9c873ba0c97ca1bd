"""Which entry points a search measures where they are in cells (`graph/cells.py`).

A seeding slot compares its query with all pivots in one extend, and then with the entry points of
the cells that it has chosen. `steps.py` calls this; `f` is the address of a slot's row.
"""

from workers.search.kernels.distances import distance
from workers.search.kernels.jit import inlined
from workers.search.kernels.keys import EMPTY, insert, key_of, row_of
from workers.search.kernels.memory import get_i64, get_u64, put_i64, put_u64
from workers.search.walk import fields


@inlined
def probe(f: int, tasks: int) -> None:
    """Choose the cells whose pivots are nearest to the query."""
    vectors, row_bytes = get_i64(f, fields.PIVOTS_VECTORS), get_i64(f, fields.ROW_BYTES)
    query, length = get_i64(f, fields.QUERY), get_i64(f, fields.LENGTH)
    metric, stored = get_i64(f, fields.METRIC), get_i64(f, fields.STORED)
    pivots, cells = get_i64(f, fields.PIVOTS_COUNT), get_i64(f, fields.CELLS)
    for i in range(fields.PROBES):
        put_u64(tasks, i, EMPTY)
    for i in range(pivots):
        far = distance(vectors + i * row_bytes, query, length, metric, stored)
        insert(tasks, fields.PROBES, key_of(far, i))
    total = 0
    for i in range(fields.PROBES):
        cell = row_of(get_u64(tasks, i))
        put_i64(f, fields.PROBED + i, cell)
        total += get_i64(cells, cell + 1) - get_i64(cells, cell)
    put_i64(f, fields.REPS_LAST, total)
    put_i64(f, fields.HAS_PROBED, 1)
    put_i64(f, fields.EXTENDS, get_i64(f, fields.EXTENDS) + 1)
    put_i64(f, fields.DISTANCES, get_i64(f, fields.DISTANCES) + pivots)


@inlined
def in_cells(f: int, tasks: int, first: int, last: int) -> None:
    """Entry points `first` to `last` of the chosen cells, as places among all of them."""
    cells, place = get_i64(f, fields.CELLS), 0
    for probe in range(fields.PROBES):
        cell = get_i64(f, fields.PROBED + probe)
        begin, end = get_i64(cells, cell), get_i64(cells, cell + 1)
        for i in range(max(first - place, 0), min(last - place, end - begin)):
            put_i64(tasks, place + i - first, begin + i)
        place += end - begin
