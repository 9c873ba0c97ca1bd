"""The inputs and the answer of a search.

They never change after they are made. They are not frozen dataclasses only because every search
makes two, and frozen ones cost 4 us of a search's 70 us (`make bench-search`, mixed).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.vector.filters.filters import Filter
from workers.vector.index.kinds import SearchKind
from workers.vector.kernels.arrays import Array
from workers.vector.kernels.keys import rows_and_distances

ExternalId = int | str | bytes


@dataclass(slots=True, kw_only=True, eq=False)
class Effort:
    """The parameters of a search; all queries of a bulk call share them."""

    k: int = 10
    top_m: int = 64  # entries of the routing list; more give more recall and take more time
    recall: float = 0.0  # target recall, replaces `top_m` by the index's measurements; 0: `top_m`
    width: int = 1  # entries expanded per extend; more need fewer extends
    patience: int = 0  # extends without change that stop the walk; 0: until no entry is left
    where: Filter | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Query(Effort):
    """One search: its effort, vector, seeds, class and deadline."""

    vector: Any  # shape (dim,), anything that NumPy takes
    seeds: Sequence[int] | Array = ()  # `SearchAnswer.top` of an earlier search
    kind: SearchKind = SearchKind.DECODE
    deadline_ms: int | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class SearchAnswer:
    """The nearest rows that a search found, nearest first; equal distances are ordered by row."""

    rows: Array  # int64
    distances: Array  # float32; see `kernels/metrics.py` for their meaning
    extends: int
    computed: int  # distances computed
    exact: bool  # whether every row that may be returned was measured
    top_keys: Array  # the whole routing list, as keys
    names: list[ExternalId]  # ids of all rows of the view that was searched
    waited_ms: float = 0.0  # wait for a slot

    @property
    def ids(self) -> list[ExternalId]:
        """Return the external ids of `rows`."""
        return [self.names[row] for row in self.rows.tolist()]

    @property
    def top(self) -> Array:
        """Return the rows of the whole routing list, int64: seeds of a later search."""
        return self.rows if self.exact else rows_and_distances(self.top_keys)[0]

    def top_ids(self) -> list[ExternalId]:
        """Return the external ids of `top`: seeds that stay valid when rows are renumbered."""
        return [self.names[row] for row in self.top.tolist()]
