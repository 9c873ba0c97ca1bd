"""Plans a search: the kind of search, the rows that it may return, and where it begins.

There are four kinds. A *scan of a list*, if a filter allows so few rows that a walk would cost
more. A *scan of all rows*, if the index is small. *All nodes as entry points*, if they are so few
and so short that a walk would take as long: copies are not measured then. Otherwise a *walk*, whose
routing list is longer the more rows a filter excludes, so that twice the wanted hits are expected
in it. A walk may end with too few hits, or with chance hits far beyond its routing list, because
the rows near the query are excluded: then `restart_as_scan` makes it a scan. So no search silently
returns fewer than min(k, rows allowed), and a wrong guess costs at most the scan that it should
have saved. The plan depends on the request and the view alone.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from schemas.errors import EmptyIndex, InvalidRequest
from workers.vector.filters.filters import AllowedRows
from workers.vector.index.query import Effort, SearchAnswer
from workers.vector.index.view import PLANS_MAX, UNCALIBRATED, IndexView
from workers.vector.kernels.arrays import Array, address_of
from workers.vector.kernels.keys import LIMIT
from workers.vector.limits import CORES_DIM_MAX, K_MAX, SCANNED_ROWS_MAX, TASKS_MAX, TOP_M_MAX
from workers.vector.traversal import fields
from workers.vector.traversal.results import SlotHits
from workers.vector.traversal.slots import ROWS_A_STEP, SlotRows, fill, hash_places

ENTRIES = 16  # entry points that a walk begins at
_MARGIN = 2  # times the length of a routing list that has the wanted hits on average
_SCANNED_PER_MEASURED = 2  # rows of a list scanned in the time in which a walk measures one
_NODES_PER_ENTRY = 64  # nodes measured in the time in which a walk expands an entry
_NODES_VALUES = 32_000  # values of nodes measured in the fixed time of a walk


class SearchLimits(NamedTuple):
    """Bounds of a search's parameters, and the size up to which an index is scanned."""

    top_m_max: int = TOP_M_MAX
    k_max: int = K_MAX
    tasks_max: int = TASKS_MAX  # width times degree
    dim_max: int = CORES_DIM_MAX
    scanned_rows_max: int = SCANNED_ROWS_MAX  # 0: all rows with edges are walked


_LIMITS = SearchLimits()
_NO_ROWS: Array = np.empty(0, np.int64)


class SearchPlan(NamedTuple):
    """A plan for all searches of one effort in one view."""

    row: Array  # int64 (fields.COUNT,), a slot's row without the columns of a request
    row_address: int  # address_of of `row`
    k: int
    top_m: int
    min_hits: int  # hits; if a walk finds fewer, all rows are scanned
    extends: int  # estimated number
    exact: bool  # whether it measures all rows that it may return
    allowed: int  # live rows that it may return
    where: AllowedRows | None

    def too_short(self, rows: Array) -> Array:
        """Return the searches with fewer than `min_hits` hits: their places in `rows`, int64.

        `rows` has shape (searches, k), with -1 beyond the last hit. A scan finds all hits.
        """
        return np.flatnonzero(rows[:, self.min_hits - 1] < 0) if self.min_hits else _NO_ROWS


@dataclass(slots=True, eq=False)
class PreparedSearch:
    """A search that is ready for a slot, with all arrays that the slot will point to."""

    view: IndexView
    plan: SearchPlan
    query: Array  # (1 or more, padded dim), float32
    warm: Array | None = None
    warm_place: tuple[int, int] = (0, 0)  # address and length of `warm`

    def enter(self, slots: SlotRows, slot: int) -> None:
        """Fill in a slot's row."""
        fill(slots.addresses[slot], self.plan.row_address, self.query, *self.warm_place)

    @property
    def row(self) -> Array:
        """Return the row for a slot, int64 (fields.COUNT,)."""
        row = self.plan.row.copy()
        row[fields.QUERY] = address_of(self.query)
        row[fields.WARM], row[fields.WARM_COUNT] = self.warm_place
        return row


def search_of(
    effort: Effort, query: Array, view: IndexView, *, seeds: Any = (),
    scanned_rows_max: int = SCANNED_ROWS_MAX, top_m_max: int = TOP_M_MAX,
) -> PreparedSearch:  # fmt: skip
    """Plan a search of prepared queries (`inputs.prepare`); raises what `plan_search` raises."""
    limits = SearchLimits(scanned_rows_max=scanned_rows_max, top_m_max=top_m_max)
    return new_search(view, plan_search(effort, view, limits), query, seeds)


def plan_search(effort: Effort, view: IndexView, limits: SearchLimits = _LIMITS) -> SearchPlan:
    """Plan searches of an effort; raises InvalidRequest, UnknownFilterField or EmptyIndex."""
    if effort.where is not None:
        return _new_plan(effort, view, limits)
    plans = view.plans
    key = (effort.k, effort.top_m, effort.recall, effort.width, effort.patience, limits)
    plan: SearchPlan | None = plans.get(key)
    if plan is None:
        while len(plans) >= PLANS_MAX:
            plans.pop(next(iter(plans)), None)
        plans[key] = plan = _new_plan(effort, view, limits)
    return plan


def new_search(view: IndexView, plan: SearchPlan, query: Array, seeds: Any = ()) -> PreparedSearch:
    """Make a search by a plan; `seeds` are rows that may be near, to begin at besides."""
    search = PreparedSearch(view, plan, query)
    if len(seeds) and plan.row[fields.REPS_COUNT]:
        warm = np.asarray(seeds, np.int64)[: plan.top_m]
        search.warm = warm = np.ascontiguousarray(warm[(warm >= 0) & (warm < view.linked)])
        search.warm_place = address_of(warm), len(warm)
    return search


def _check(effort: Effort, view: IndexView, limits: SearchLimits) -> None:
    for name, value, limit in (
        ("k", effort.k, limits.k_max),
        ("top_m", effort.top_m, limits.top_m_max),
        ("width", effort.width, limits.tasks_max // view.graph.shape[1]),
    ):
        if not 1 <= value <= limit:
            raise InvalidRequest(f"expected {name} from 1 to {limit}, found {value}", name)
    if not 0 <= effort.recall < 1:
        raise InvalidRequest(f"expected recall from 0 to below 1, found {effort.recall}", "recall")
    if effort.patience < 0:
        raise InvalidRequest(f"expected patience >= 0, found {effort.patience}", "patience")
    if view.live == 0:
        raise EmptyIndex("expected an index with rows, found an empty one; upsert some first")
    if view.vectors.shape[1] > limits.dim_max:
        raise InvalidRequest(
            f"expected vectors of up to {limits.dim_max} values, found {view.dim}; raise the "
            "setting retrieval.cuda_dim_max, or choose device cpu"
        )


def _new_plan(effort: Effort, view: IndexView, limits: SearchLimits) -> SearchPlan:
    _check(effort, view, limits)
    row = view.template.copy()
    row[fields.K], row[fields.WIDTH] = effort.k, effort.width
    row[fields.PATIENCE] = effort.patience
    top_m = min(max(_top_m(effort, view, limits), effort.k), limits.top_m_max)
    allowed, where = view.live, None
    if limits.scanned_rows_max and view.nodes is not None and _are_few(view.nodes, top_m, row):
        top_m = effort.k
        _enter_all(row, view, view.nodes)
    if effort.where is not None:
        where = view.allowed(effort.where)
        row[fields.SCREENED], row[fields.ALLOWED] = 1, address_of(where.bits)
        allowed = where.count
        longer = _longer_list(top_m, effort.k, where.count / view.count)
        cost = row[fields.REPS_COUNT] if row[fields.WHOLE] else longer * view.graph.shape[1]
        if longer > limits.top_m_max or where.count <= _SCANNED_PER_MEASURED * cost:
            _scan_list(row, where.rows)
        elif not row[fields.WHOLE]:
            top_m = longer
    row[fields.TOP_M], row[fields.HASH_MASK] = top_m, hash_places(top_m) - 1
    row[fields.ENTRIES] = top_m if row[fields.WHOLE] else min(ENTRIES, top_m)
    is_small = view.count <= max(limits.scanned_rows_max, effort.k) and not row[fields.WHOLE]
    if view.linked == 0 or is_small:
        _scan_all(row, view, where)
    exact = bool(row[fields.LIST_COUNT] or row[fields.WHOLE] or not row[fields.REPS_COUNT])
    if allowed < view.count and not exact:
        row[fields.NEEDED] = min(effort.k, int(top_m * allowed / view.count / _MARGIN))
    loose = row[fields.LOOSE_LAST] - row[fields.LOOSE_FIRST]
    seeds = row[fields.LIST_COUNT] or row[fields.REPS_COUNT] + loose
    extends = -(-seeds // ROWS_A_STEP) + (0 if exact else top_m // effort.width + 3)
    row[fields.WANTED] = min_hits = 0 if exact else min(effort.k, allowed)
    return SearchPlan(
        row, address_of(row), effort.k, top_m, min_hits, int(extends), exact, allowed, where
    )


def _are_few(nodes: Array, top_m: int, row: Array) -> bool:
    """Return whether to measure all nodes takes less time than to walk with `top_m` entries."""
    return len(nodes) <= _NODES_PER_ENTRY * top_m + _NODES_VALUES // int(row[fields.LENGTH])


def _enter_all(row: Array, view: IndexView, nodes: Array) -> None:
    row[fields.REPS], row[fields.REPS_COUNT] = address_of(nodes), len(nodes)
    row[fields.REPS_PANELS], row[fields.WHOLE] = address_of(view.node_panels), 1


def _top_m(effort: Effort, view: IndexView, limits: SearchLimits) -> int:
    """Return the entries of the routing list for the target recall, or the requested ones."""
    if not effort.recall:
        return effort.top_m
    if view.audit is None:
        return min(UNCALIBRATED, limits.top_m_max)
    return view.audit.top_m(effort.recall, effort.k, limits.top_m_max)


def _longer_list(top_m: int, k: int, share: float) -> int:
    """Return the length of a routing list if only this share of rows may be returned."""
    return math.ceil(max(top_m * share**-0.5, _MARGIN * k / share)) if share else top_m


def _scan_list(row: Array, rows: Array) -> None:
    row[fields.LIST], row[fields.LIST_COUNT] = address_of(rows), len(rows)
    row[fields.REPS_COUNT] = row[fields.LOOSE_LAST] = row[fields.LOOSE_FIRST] = 0
    row[fields.WARM_COUNT] = row[fields.NEEDED] = row[fields.CHAIN] = row[fields.WHOLE] = 0


def _scan_all(row: Array, view: IndexView, where: AllowedRows | None) -> None:
    _scan_list(row, _NO_ROWS if where is None else where.rows)
    if not row[fields.LIST_COUNT]:
        row[fields.LOOSE_LAST], row[fields.SCREENED] = view.count, 1


def restart_as_scan(search: PreparedSearch, slots: SlotRows, slot: int) -> bool:
    """Make an ended search a scan of all rows if it has too few hits; return whether it has."""
    row = slots.fields[slot]
    min_hits = search.plan.min_hits
    if not min_hits or keys_of(slots, slot)[min_hits - 1] < LIMIT:
        return False
    _scan_all(row, search.view, search.plan.where)
    row[fields.STATUS] = fields.FRESH
    return True


def keys_of(slots: SlotRows, slot: int) -> Array:
    """Return the keys of a slot's hits, ascending."""
    row = slots.fields[slot]
    lists = slots.hit_keys if row[fields.SCREENED] or row[fields.CHAIN] else slots.top
    keys: Array = lists[slot, : row[fields.K]]
    return keys


def answer(search: PreparedSearch, hits: SlotHits) -> SearchAnswer:
    """Make the answer of an ended search from its hits."""
    view = search.view
    rows, distances, top_keys, extends, computed, is_scan = hits
    return SearchAnswer(
        rows=rows,
        distances=view.metric.to_user_distances(distances),
        extends=extends,
        computed=computed,
        exact=bool(is_scan),
        top_keys=top_keys,
        names=view.ids,
    )
