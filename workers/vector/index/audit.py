"""Searches an index for its own rows, and makes rows that are not found entry points.

A graph of near neighbours has islands, and no rule of distance alone shows where walks must begin
to reach all of them. So it is tested: a row is missed if a search for it finds nothing as near as
the row. Rounds with other rows follow until few are missed; the missed share of the last round is
the index's `missed_share`. Routing lists are short while each round misses clearly less than the
one before.

The length of a routing list for a recall is measured with held-out rows, to which no edges lead, as
if they had never been added. A scan of all other rows is the truth. If the usual list finds too few
of the nearest rows, those that it misses become entry points, as long as they help more than random
ones would; in an index that grew, if it finds much less than before.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from workers.vector.graph import duplicates, exact
from workers.vector.graph.panel_scan import PanelScan
from workers.vector.index.query import Effort
from workers.vector.index.view import IndexAudit, IndexView
from workers.vector.kernels.arrays import Array, all_but, stored_bits
from workers.vector.kernels.distances import distance, load
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.memory import address
from workers.vector.kernels.panels import PANEL_DIM_MAX
from workers.vector.limits import SCANNED_ROWS_MAX, TOP_M_MAX

Neighbours = Callable[[IndexView, Array, Effort], Array]  # rows for prepared queries: (queries, k)
NearestOf = Callable[[Array, int], Array]  # k nearest rows of some, without these: (rows, k)

ROUNDS_MAX = 8
_GROWN_ROUNDS_MAX = 2  # for an index that grew by an eighth: the next audit continues
HELD_OUT = 200  # rows that lists of several lengths are measured with
_HELD_OUT_OFTEN = 400  # rows of each round of `extend_entries`
_OFTEN_SHARE = 0.2  # of all rows in these rounds together, or they were most of a small build
LENGTHS = (16, 32, 64, 128, 256, 512, 1_024, TOP_M_MAX)
RECALL_ENOUGH = 0.995  # of the nearest 10, beyond which no longer list is measured
ENOUGH = 0.002  # share of missed rows that ends the rounds
MANY = 0.01  # share of missed rows above which `Index.relink_lost` searches for all rows
_SEARCHED_MIN, _SEARCHED_PER_ROOT = 1_024, 4  # rows of a round: at least, and times sqrt(rows)
_GROWN_FEWER = 4  # divides them for an index that grew: its rounds were a fifth of linking
_EFFORT = Effort(k=1, top_m=64)
_SHORT = Effort(k=1, top_m=16)
_LESS = 0.75  # of the share before; if a round misses more, short lists do not measure islands
REACHED = 0.975  # share of the nearest of held-out rows that ends the rounds
_FELL = 0.05  # drop of that share that growth alone does not explain
_WORTH = 4  # times the gain of random entry points
_FEW, _MOST = 10, 100  # nearest rows whose recall is measured
_OF_MOST_ENOUGH = 0.97
# Rows up to which the nearest of long held-out rows are found by a scan, in a new index and in one
# that grew. Products take a quarter of the time, but their rounding exceeds the differences between
# rows of some data.
_SCANNED_MOST, _SCANNED_GROWN = 1 << 17, 1 << 15
_CLOSE = 2e-6  # relative distance between a copy and its node (`graph/near_duplicates.py`)
_LONG, _GAIN = 256, 0.002  # from this length on, a longer list is measured only after such a gain


def audit_index(
    view: IndexView, neighbours: Neighbours, *, seed: int, before: IndexAudit | None = None,
    threads: int = 0,
) -> tuple[Array, IndexAudit]:  # fmt: skip
    """Return entry points, with those that searches of `view` needed, and the audit's results.

    All rows of `view` are linked and live. The recalls that were measured `before` are kept unless
    there are many more rows now. `threads` are for work that is not a search (0: all cores).
    """
    view = replace(view, is_walked=True, plans={})
    random = np.random.default_rng(seed)
    limit, part = (ROUNDS_MAX, 1) if before is None else (_GROWN_ROUNDS_MAX, _GROWN_FEWER)
    view, rounds, share = _add_missed_entries(view, neighbours, random, limit, part)
    calibrated, efforts = view.linked, tuple[tuple[int, float, float], ...]()
    if before is not None and not before.is_uncalibrated(view.linked):
        calibrated, efforts = before.calibrated, before.efforts
    elif view.linked > max(SCANNED_ROWS_MAX, 8 * HELD_OUT):  # smaller indexes are scanned
        scanned = _SCANNED_MOST if before is None else _SCANNED_GROWN
        nearest_of = build_nearest_of(view, neighbours, scanned, threads=threads)
        rng = np.random.default_rng([seed, view.linked])  # the same rows after any rounds
        held_out = HeldOutRows.draw(view, nearest_of, rng, HELD_OUT, _MOST)
        target = (
            REACHED if before is None else min(REACHED, before.recall_at(_EFFORT.top_m) - _FELL)
        )
        if held_out.recall(neighbours, view.entries) < target:
            entries = extend_entries(view, neighbours, nearest_of, random, limit)
            view = replace(view, entries=entries, plans={})
        efforts = measure_recalls(held_out, neighbours, view.entries)
    return view.entries, IndexAudit(
        rows=view.linked, entries=len(view.entries), rounds=rounds, missed_share=share,
        calibrated=calibrated, efforts=efforts,
    )  # fmt: skip


def _add_missed_entries(
    view: IndexView, neighbours: Neighbours, random: np.random.Generator, limit: int, part: int = 1
) -> tuple[IndexView, int, float]:
    """Add missed rows as entry points; return the view, the rounds, and the last missed share.

    There are at most `limit` rounds; if the last one had short lists, one more has the usual ones.
    """
    rounds, share, effort, is_usual = 0, 1.0, _SHORT, False
    while share > ENOUGH and (rounds < limit or not is_usual):
        effort = _EFFORT if rounds >= limit else effort
        rounds, before, is_usual = rounds + 1, share, effort is _EFFORT
        missed, share = find_missed(view, neighbours, random, part, effort)
        if share > _LESS * before:
            effort = _EFFORT
        view = replace(view, entries=np.union1d(view.entries, missed), plans={})
    return view, rounds, share


def extend_entries(
    view: IndexView, neighbours: Neighbours, nearest_of: NearestOf, random: np.random.Generator,
    limit: int = ROUNDS_MAX,
) -> Array:  # fmt: skip
    """Return entry points with the nearest rows of held-out rows that searches missed.

    Each round tests with other rows whether the last additions find more than as many random ones
    would; if not, they are removed again.
    """
    best = entries = view.entries
    for _ in range(min(limit, int(_OFTEN_SHARE * view.linked / _HELD_OUT_OFTEN))):
        held_out = HeldOutRows.draw(view, nearest_of, random, _HELD_OUT_OFTEN, _FEW)
        share, missed = held_out.find_missed(neighbours, entries)
        if len(entries) > len(best):
            before = held_out.recall(neighbours, best)
            added = (len(entries) - len(best)) / view.linked
            if share - before <= _WORTH * added * (1 - before):
                break
            best = entries
        if share >= REACHED:
            break
        entries = np.union1d(best, missed)
    return best


def build_nearest_of(
    view: IndexView, neighbours: Neighbours, scanned: int = _SCANNED_MOST, *, threads: int = 0
) -> NearestOf:
    """Return a function that finds the nearest rows of some rows, without all of these.

    Short vectors are measured in panels. Long ones are found by a scan of up to `scanned` rows,
    beyond that by products.
    """
    vectors, kernel = view.vectors[: view.linked], (view.metric.number, view.storage.number)

    def scan(rows: Array, k: int) -> Array:
        loose = replace(
            view, graph=view.graph[:0], entries=view.entries[:0], chain=None, linked=0, codes=None,
            plans={}, live=view.linked - len(rows), alive=all_but(rows, view.linked),
        )  # fmt: skip
        return neighbours(loose, vectors[rows].astype(np.float32), Effort(k=k, top_m=k))

    def by_products(rows: Array, k: int) -> Array:
        return exact.nearest_others(vectors, rows, k, *kernel, threads=threads)

    if vectors.shape[1] <= PANEL_DIM_MAX:
        return PanelScan(vectors, kernel[0], threads=threads).nearest
    return scan if view.linked <= scanned else by_products


class HeldOutRows(NamedTuple):
    """Rows that are searched for as if they had never been added."""

    view: IndexView  # without edges to these rows
    hidden: Array  # bool (rows,): which rows are hidden in it
    rows: Array
    queries: Array
    nearest: Array  # the nearest other rows by a scan, int64 (held out, k)
    distances: Array  # their distances, float32

    @classmethod
    def draw(
        cls, view: IndexView, nearest_of: NearestOf, random: np.random.Generator, count: int, k: int
    ) -> "HeldOutRows":
        """Draw `count` rows and find their k nearest ones."""
        rows = np.sort(random.choice(view.linked, count, replace=False))
        hidden = np.zeros(view.linked, bool)
        hidden[rows] = True if view.chain is None else duplicates.are_lone(view.chain)[rows]
        graph = view.graph.copy()
        _hide(graph, hidden)
        alive = None if view.chain is None else all_but(rows, view.linked)
        queries, nearest = view.vectors[rows].astype(np.float32), nearest_of(rows, k)
        walked = replace(view, graph=graph, alive=alive)
        return cls(walked, hidden, rows, queries, nearest, _distances(view, rows, nearest))

    def search(self, neighbours: Neighbours, entries: Array, k: int, top_m: int) -> Array:
        """Return the rows that searches from these entry points find, (held out, k)."""
        view = replace(self.view, entries=entries[~self.hidden[entries]], plans={})
        return neighbours(view, self.queries, Effort(k=k, top_m=top_m))

    def recall(self, neighbours: Neighbours, entries: Array) -> float:
        """Return the share of the nearest rows that the usual searches find."""
        return float(self.are_near(self.search(neighbours, entries, _FEW, _EFFORT.top_m)).mean())

    def find_missed(self, neighbours: Neighbours, entries: Array) -> tuple[float, Array]:
        """Return the recall, and the nodes of the nearest rows that searches miss."""
        hits = self.search(neighbours, entries, _FEW, _EFFORT.top_m)
        nearest, chain = self.nearest[:, :_FEW], self.view.chain
        rows = np.unique(nearest[(nearest[:, :, None] != hits[:, None]).all(2)])
        missed = rows if chain is None else duplicates.heads(chain)[rows]
        return float(self.are_near(hits).mean()), missed

    def are_near(self, hits: Array) -> Array:
        """Return whether hits, (held out, k), are as near as the k-th nearest: same shape."""
        return _are_near(
            _distances(self.view, self.rows, hits), self.distances[:, [hits.shape[1] - 1]]
        )

    def subset(self, mask: Array) -> "HeldOutRows":
        """Return the rows that a mask selects, bool (held out,)."""
        return self._replace(
            rows=self.rows[mask], queries=self.queries[mask], nearest=self.nearest[mask],
            distances=self.distances[mask],
        )  # fmt: skip


def measure_recalls(
    held_out: HeldOutRows, neighbours: Neighbours, entries: Array
) -> tuple[tuple[int, float, float], ...]:
    """Measure lengths of routing lists, ascending, and their recall of the 10 and 100 nearest of
    held-out rows. Rows with full recall are not searched for with longer lists."""
    results: list[tuple[int, float, float]] = []
    shares = np.zeros((len(held_out.rows), 2))  # of each row's 10 and 100 nearest
    rest = np.ones(len(held_out.rows), bool)
    for length in LENGTHS:
        k = min(_MOST, length)
        part = held_out.subset(rest)
        dists = _distances(part.view, part.rows, part.search(neighbours, entries, k, length))
        for column, few in enumerate((_FEW, k)):
            shares[rest, column] = _are_near(dists[:, :few], part.distances[:, [few - 1]]).mean(1)
        of_few, of_most = shares.mean(0).tolist()
        results.append((length, of_few, of_most if k == _MOST else 0.0))
        if k == _MOST and of_few >= RECALL_ENOUGH and of_most >= _OF_MOST_ENOUGH:
            break
        if length >= _LONG and of_few - results[-2][1] < _GAIN:
            break
        rest = rest if k < _MOST else shares.min(1) < 1
    return tuple(results)


def _are_near(distances: Array, limits: Array) -> Array:
    """Return whether distances are within the limits, up to rounding: bool."""
    near: Array = distances <= limits + _CLOSE * np.abs(limits)
    return near


def _distances(view: IndexView, rows: Array, hits: Array) -> Array:
    """Return the distances of hits from `rows`, float32 (held out, k); infinite for row -1."""
    out = np.full(hits.shape, np.inf, np.float32)
    _measure(stored_bits(view.vectors), rows, hits, view.metric.number, view.storage.number, out)
    return out


@kernel
def _measure(
    vectors: Array, rows: Array, hits: Array, metric: int, stored: int, out: Array
) -> None:
    """Write to `out`, float32 (rows, k), the distances of `hits`, int64 of the same shape, from
    `rows`, int64; hits of -1 are skipped. `vectors` are stored bits."""
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    query = np.empty(length, np.float32)
    for i in range(len(rows)):
        load(start + rows[i] * row_bytes, address(query), length, stored)
        for place in range(hits.shape[1]):
            if hits[i, place] >= 0:
                at = start + hits[i, place] * row_bytes
                out[i, place] = distance(at, address(query), length, metric, stored)


@kernel
def _hide(graph: Array, hidden: Array) -> None:
    """Remove the edges to `hidden` rows, bool (rows,), in place."""
    for row in range(len(graph)):
        count = 0
        for place in range(graph.shape[1]):
            neighbour = graph[row, place]
            if not hidden[neighbour]:
                graph[row, count] = neighbour
                count += 1
        graph[row, count:] = row


def find_missed(
    view: IndexView, neighbours: Neighbours, random: np.random.Generator, part: int = 1,
    effort: Effort = _EFFORT,
) -> tuple[Array, float]:  # fmt: skip
    """Search for a sample of rows; return the nodes of those not found, and their share.

    `part` divides the size of the sample.
    """
    live = view.live_rows()
    if not len(live):
        return live, 0.0
    count = min(len(live), max(_SEARCHED_MIN, int(_SEARCHED_PER_ROOT * len(live) ** 0.5)) // part)
    rows = np.sort(random.choice(live, count, replace=False))
    nearest = neighbours(view, view.vectors[rows].astype(np.float32), effort)[:, 0]
    bits = stored_bits(view.vectors)
    missed = _are_missed(bits, rows, nearest, view.metric.number, view.storage.number)
    if view.chain is not None:  # a copy that differs by rounding is found with its node
        heads = duplicates.heads(view.chain)
        rows = heads[rows]
        missed &= (nearest < 0) | (heads[nearest] != rows)
    return rows[missed], int(missed.sum()) / count


def find_lost(view: IndexView, rows: Array, neighbours: Neighbours, k: int) -> tuple[Array, Array]:
    """Search for `rows`; return those not found, and the k rows that were found instead of each.

    All are nodes, int64; shapes (lost,) and (lost, k), -1 at the end of short lists.
    """
    queries = view.vectors[rows].astype(np.float32)
    nearest = neighbours(view, queries, Effort(k=k, top_m=_EFFORT.top_m))
    bits = stored_bits(view.vectors)
    are_lost = _are_missed(bits, rows, nearest[:, 0], view.metric.number, view.storage.number)
    are_lost &= (nearest != rows[:, None]).all(1)
    return rows[are_lost], nearest[are_lost]


@kernel
def _are_missed(vectors: Array, rows: Array, nearest: Array, metric: int, stored: int) -> Array:
    """Return for each of `rows` whether nothing was found, or nothing as near as the row itself.

    `vectors` are stored bits; `rows` and `nearest` are int64 (searched,), -1 if nothing was found.
    Returns bool (searched,).
    """
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    query, out = np.empty(length, np.float32), np.empty(len(rows), np.bool_)
    for i in range(len(rows)):
        row_address = start + rows[i] * row_bytes
        load(row_address, address(query), length, stored)
        out[i] = nearest[i] < 0
        if not out[i]:
            dist = distance(start + nearest[i] * row_bytes, address(query), length, metric, stored)
            out[i] = distance(row_address, address(query), length, metric, stored) < dist
    return out
