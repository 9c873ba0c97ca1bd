"""Fills in a slot for a search: which way it goes, what it may return, where it begins.

Three ways. A *scan of a list* where a filter allows few rows. A *scan of all rows* where the index
is small. Otherwise a *walk*, with a routing list that is longer the more rows a filter excludes. A
walk may end with fewer hits than there are, next to rows that a filter excludes or in a component
that is too small: `rescanned` then makes it a scan, so that no search silently returns fewer than
min(k, rows allowed). Which way depends on the request and the snapshot alone.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from schemas.errors import EmptyIndex, InvalidRequest
from workers.search import fields, memory
from workers.search.compiled import kernel
from workers.search.filters import Allowed
from workers.search.hits import Reader
from workers.search.keys import EMPTY, FLAG
from workers.search.query import Answer, Effort
from workers.search.slots import ROWS_A_STEP, TASKS_MAX, Slots, hash_places
from workers.search.view import COMPILED_MAX, IndexView, address

Array = np.ndarray[Any, Any]

SCANNED_ROWS_MAX = 1_024  # smaller indexes are scanned whole
ENTRIES = 16  # representatives that a walk begins at
TOP_M_MAX, K_MAX = 512, 512


class Way(NamedTuple):
    """How searches of one effort go in one snapshot; nothing of a request."""

    row: Array  # int64, `fields.COUNT`, without the query
    extends: int  # about how many it takes
    exact: bool  # it scans all rows that it may return
    allowed: int  # live rows that it may return
    where: Allowed | None


@dataclass(slots=True, eq=False)
class Search:
    """A search that is ready for a slot, with all that the slot will point to."""

    row: Array  # int64, `fields.COUNT`
    view: IndexView
    query: Array  # (1 or more, padded dim), float32
    k: int
    way: Way
    warm: Array | None = None

    @property
    def exact(self) -> bool:
        """Whether it scans all rows that it may return."""
        return self.way.exact

    @property
    def where(self) -> Allowed | None:
        """The filter, as far as it has one."""
        return self.way.where

    @property
    def allowed(self) -> int:
        """Live rows that it may return."""
        return self.way.allowed

    @property
    def extends(self) -> int:
        """About how many extends it takes."""
        return self.way.extends


def check(
    effort: Effort, view: IndexView, *, top_m_max: int = TOP_M_MAX, k_max: int = K_MAX,
    tasks_max: int = TASKS_MAX,
) -> None:  # fmt: skip
    """Raise InvalidRequest or EmptyIndex where a search cannot be done."""
    for name, value, most in (
        ("k", effort.k, k_max),
        ("top_m", effort.top_m, top_m_max),
        ("width", effort.width, tasks_max // view.graph.shape[1]),
    ):
        if not 1 <= value <= most:
            raise InvalidRequest(f"expected {name} from 1 to {most}, found {value}", name)
    if effort.patience < 0:
        raise InvalidRequest(f"expected patience >= 0, found {effort.patience}", "patience")
    if view.live == 0:
        raise EmptyIndex("expected an index with rows, found an empty one; upsert some first")


def admission(
    effort: Effort, query: Array, view: IndexView, *, seeds: Any = (),
    scanned_rows_max: int = SCANNED_ROWS_MAX, top_m_max: int = TOP_M_MAX,
) -> Search:  # fmt: skip
    """A search of prepared queries (`metrics.prepared`); the effort is checked already."""
    if effort.where is None:  # the usual case: what it shares with others is looked up
        key = (
            effort.k, effort.top_m, effort.width, effort.patience, scanned_rows_max, top_m_max
        )  # fmt: skip
        way = view.ways.get(key)
        if way is None:
            while len(view.ways) >= COMPILED_MAX:
                view.ways.pop(next(iter(view.ways)), None)
            view.ways[key] = way = _way(effort, view, scanned_rows_max, top_m_max)
    else:
        way = _way(effort, view, scanned_rows_max, top_m_max)
    row = way.row.copy()
    row[fields.QUERY] = _place(query)
    search = Search(row, view, query, effort.k, way)
    if len(seeds) and row[fields.REPS_COUNT]:
        warm = np.asarray(seeds, np.int64)[: row[fields.TOP_M]]
        search.warm = warm = np.ascontiguousarray(warm[(warm >= 0) & (warm < view.linked)])
        row[fields.WARM], row[fields.WARM_COUNT] = address(warm), len(warm)
    return search


@kernel
def _place(query: Array) -> int:
    """What `address` says, in a fifth of its time."""
    place: int = memory.address(query)
    return place


def _way(effort: Effort, view: IndexView, scanned_rows_max: int, top_m_max: int) -> Way:
    row = view.template.copy()
    row[fields.K], row[fields.WIDTH] = effort.k, effort.width
    row[fields.PATIENCE] = effort.patience
    top_m, allowed, where = max(effort.top_m, effort.k), view.live, None
    if effort.where is not None:
        where = view.allowed(effort.where)
        row[fields.SCREENED], row[fields.ALLOWED] = 1, address(where.bits)
        allowed = where.count
        if where.rows is not None:
            _list(row, where.rows)
        else:
            top_m = min(top_m_max, int(top_m * (view.live / where.count) ** 0.5))
    row[fields.TOP_M], row[fields.HASH_MASK] = top_m, hash_places(top_m) - 1
    row[fields.ENTRIES] = min(ENTRIES, top_m)
    if view.linked == 0 or view.count <= max(scanned_rows_max, effort.k):
        _all(row, view)
    exact = bool(row[fields.LIST_COUNT]) or not row[fields.REPS_COUNT]
    seeds = row[fields.LIST_COUNT] or (
        row[fields.REPS_COUNT] + row[fields.LOOSE_LAST] - row[fields.LOOSE_FIRST]
    )
    extends = -(-seeds // ROWS_A_STEP) + (0 if exact else top_m // effort.width + 3)
    return Way(row, int(extends), exact, allowed, where)


def _list(row: Array, rows: Array) -> None:
    row[fields.LIST], row[fields.LIST_COUNT] = address(rows), len(rows)
    row[fields.REPS_COUNT] = row[fields.LOOSE_LAST] = row[fields.LOOSE_FIRST] = 0


def _all(row: Array, view: IndexView) -> None:
    if not row[fields.LIST_COUNT]:
        row[fields.REPS_COUNT] = row[fields.LOOSE_FIRST] = row[fields.WARM_COUNT] = 0
        row[fields.LOOSE_LAST], row[fields.SCREENED] = view.count, 1


def rescanned(search: Search, slots: Slots, slot: int) -> bool:
    """Whether a search that ended has too few hits, and was made a scan of all rows instead."""
    row = slots.fields[slot]
    wanted = min(search.k, search.way.allowed)
    if search.way.exact or keys_of(slots, slot)[wanted - 1] < EMPTY - FLAG:
        return False
    _all(row, search.view)
    row[fields.STATUS] = fields.FRESH
    return True


def keys_of(slots: Slots, slot: int) -> Array:
    """Keys of a slot's hits, ascending."""
    row = slots.fields[slot]
    lists = slots.found if row[fields.SCREENED] else slots.top
    found: Array = lists[slot, : row[fields.K]]
    return found


def answered(search: Search, slots: Slots, slot: int, reader: Reader) -> Answer | None:
    """The answer of a search that is done; None if it is to be run again, as a scan."""
    view = search.view
    hits, entries, extends, computed, scanned = reader.read(slot)
    if hits < min(search.k, search.way.allowed) and not search.way.exact and not scanned:
        assert rescanned(search, slots, slot)
        return None
    rows = reader.rows[:hits].copy()
    names = view.ids
    return Answer(
        rows=rows,
        ids=[names[i] for i in rows.tolist()],
        distances=view.metric.shown(reader.distances[:hits]),
        extends=extends,
        computed=computed,
        exact=bool(scanned),
        top_keys=slots.top[slot, :entries].copy(),
        names=names,
    )
