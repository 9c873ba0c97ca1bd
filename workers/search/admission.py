"""Fills in a slot for a search: which way it goes, what it may return, where it begins.

Three ways. A *scan of a list* where a filter allows few rows. A *scan of all rows* where the index
is small. Otherwise a *walk*, with a routing list that is longer the more rows a filter excludes. A
walk may end with fewer hits than there are, next to rows that a filter excludes or in a component
that is too small: `rescanned` then makes it a scan, so that no search silently returns fewer than
min(k, rows allowed). Which way depends on the request and the snapshot alone.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from schemas.errors import EmptyIndex, InvalidRequest
from workers.search import fields
from workers.search.filters import Allowed
from workers.search.keys import EMPTY, FLAG, held
from workers.search.query import Answer, Effort
from workers.search.slots import TASKS_MAX, Slots, hash_places
from workers.search.view import IndexView, address

Array = np.ndarray[Any, Any]

SCANNED_ROWS_MAX = 1_024  # smaller indexes are scanned whole
ENTRIES = 16  # representatives that a walk begins at
TOP_M_MAX, K_MAX = 512, 512


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """A search that is ready for a slot, with all that the slot will point to."""

    row: Array  # int64, `fields.COUNT`
    view: IndexView
    query: Array  # (1 or more, padded dim), float32
    k: int
    allowed: int  # live rows that it may return
    where: Allowed | None = None
    warm: Array | None = None

    @property
    def exact(self) -> bool:
        """Whether it scans all rows that it may return."""
        row = self.row
        return bool(row[fields.LIST_COUNT]) or not row[fields.REPS_COUNT]

    @property
    def extends(self) -> int:
        """About how many extends it takes."""
        row = self.row
        seeds = row[fields.LIST_COUNT] or (
            row[fields.REPS_COUNT] + row[fields.LOOSE_LAST] - row[fields.LOOSE_FIRST]
        )
        walk = 0 if self.exact else row[fields.TOP_M] // row[fields.WIDTH] + 3
        return int(-(-seeds // 64) + walk)


def check(
    effort: Effort, view: IndexView, *, top_m_max: int = TOP_M_MAX, k_max: int = K_MAX
) -> None:
    """Raise InvalidRequest or EmptyIndex where a search cannot be done."""
    for name, value, most in (
        ("k", effort.k, k_max),
        ("top_m", effort.top_m, top_m_max),
        ("width", effort.width, max(1, TASKS_MAX // view.graph.shape[1])),
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
    row = view.template.copy()
    row[fields.K], row[fields.QUERY], row[fields.WIDTH] = effort.k, address(query), effort.width
    row[fields.PATIENCE] = effort.patience
    top_m = max(effort.top_m, effort.k)
    search = Search(row, view, query, effort.k, view.live)
    if effort.where is not None:
        where = view.allowed(effort.where)
        row[fields.SCREENED], row[fields.ALLOWED] = 1, address(where.bits)
        search = replace(search, allowed=where.count, where=where)
        if where.rows is not None:
            _list(row, where.rows)
        else:
            top_m = min(top_m_max, int(top_m * (view.live / where.count) ** 0.5))
    row[fields.TOP_M], row[fields.HASH_MASK] = top_m, hash_places(top_m) - 1
    row[fields.ENTRIES] = min(ENTRIES, top_m)
    if view.linked == 0 or view.count <= max(scanned_rows_max, effort.k):
        _all(row, view)
    elif len(seeds):
        warm = np.asarray(seeds, np.int64)[:top_m]
        warm = np.ascontiguousarray(warm[(warm >= 0) & (warm < view.linked)])
        row[fields.WARM], row[fields.WARM_COUNT] = address(warm), len(warm)
        search = replace(search, warm=warm)
    return search


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
    if search.exact or keys_of(slots, slot)[min(search.k, search.allowed) - 1] < EMPTY - FLAG:
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


def answered(search: Search, slots: Slots, slot: int) -> Answer:
    """The answer of a search that is done."""
    row, names = slots.fields[slot], search.view.ids
    keys, top = keys_of(slots, slot), slots.top[slot, : row[fields.TOP_M]]
    rows, distances = held(keys[: np.searchsorted(keys, EMPTY - FLAG)])
    return Answer(
        rows=rows,
        ids=[names[i] for i in rows.tolist()],
        distances=search.view.metric.shown(distances),
        extends=int(row[fields.EXTENDS]),
        computed=int(row[fields.DISTANCES]),
        exact=not row[fields.REPS_COUNT],
        top_keys=top[: np.searchsorted(top, EMPTY - FLAG)].copy(),
        names=names,
    )
