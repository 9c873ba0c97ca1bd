"""Searches an index for rows of its own, and makes those that are not found entry points.

A graph of near neighbours has islands: clusters of other scales, copies, outliers. How a row is
reached depends on where searches begin, and no rule of distance alone knows that beforehand. So it
is tried: a row is missed where a search for it finds nothing as near as itself. Rounds follow each
other until few are missed, each with other rows; what is missed in the last is the index's
`missed_share`. By inner product a row may rightly find a longer one; then it says less.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from workers.search.index.query import Effort
from workers.search.index.view import Audit, IndexView
from workers.search.kernels.arrays import Array, stored_bits
from workers.search.kernels.distances import distance, load
from workers.search.kernels.jit import kernel
from workers.search.kernels.memory import address

Neighbours = Callable[[IndexView, Array, Effort], Array]  # rows for prepared queries: (queries, k)

ROUNDS_MAX = 8
ENOUGH = 0.002  # share of missed rows that ends the rounds
_SEARCHED_MIN, _SEARCHED_PER_ROOT = 1_024, 4  # rows of a round, and times sqrt(rows)
_EFFORT = Effort(k=1, top_m=64)


def audited(view: IndexView, neighbours: Neighbours, *, seed: int) -> tuple[Array, Audit]:
    """Entry points with those that searches of `view` needed; all its rows are linked and live."""
    random, rounds, share = np.random.default_rng(seed), 0, 1.0
    while rounds < ROUNDS_MAX and share > ENOUGH:
        rounds += 1
        missed, share = tried(view, neighbours, random)
        view = replace(view, entries=np.union1d(view.entries, missed), ways={})
    last = Audit(rows=view.linked, entries=len(view.entries), rounds=rounds, missed_share=share)
    return view.entries, last


def tried(
    view: IndexView, neighbours: Neighbours, random: np.random.Generator
) -> tuple[Array, float]:
    """Rows that were searched for and not found, and which share of the searched they are."""
    live = view.live_rows()
    if not len(live):
        return live, 0.0
    count = min(len(live), max(_SEARCHED_MIN, int(_SEARCHED_PER_ROOT * len(live) ** 0.5)))
    rows = np.sort(random.choice(live, count, replace=False))
    found = neighbours(view, view.vectors[rows].astype(np.float32), _EFFORT)[:, 0]
    bits = stored_bits(view.vectors)
    missed = rows[_missed(bits, rows, found, view.metric.number, view.storage.number)]
    return missed, len(missed) / count


@kernel
def _missed(vectors: Array, rows: Array, found: Array, metric: int, stored: int) -> Array:
    """Of each of `rows` whether it is nearer to itself than what was found for it, or nothing was.

    `vectors` are stored bits; `rows` and `found` are int64 (searched,), -1 where nothing was found.
    Returns bool (searched,).
    """
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    query, out = np.empty(length, np.float32), np.empty(len(rows), np.bool_)
    for i in range(len(rows)):
        own = start + rows[i] * row_bytes
        load(own, address(query), length, stored)
        out[i] = found[i] < 0
        if not out[i]:
            far = distance(start + found[i] * row_bytes, address(query), length, metric, stored)
            out[i] = distance(own, address(query), length, metric, stored) < far
    return out
