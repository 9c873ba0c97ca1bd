"""What a search is asked and what it answers.

Nothing changes these once they are made. They are not frozen only because every search makes two,
and to make frozen ones takes 4 us of the 70 us that a search takes (`make bench-search`, mixed).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.search.index.kinds import SearchKind
from workers.search.kernels.arrays import Array
from workers.search.kernels.keys import rows_and_distances
from workers.search.metadata.filters import Filter

ExternalId = int | str | bytes


@dataclass(slots=True, kw_only=True, eq=False)
class Effort:
    """How a search is done; the same for all queries of a bulk call."""

    k: int = 10
    top_m: int = 64  # entries of the routing list: more of them, more recall and more time
    recall: float = 0.0  # aimed at, in place of `top_m`, by what the index measured; 0: `top_m`
    width: int = 1  # entries expanded per extend: more of them, fewer extends
    patience: int = 0  # stop after so many extends without change; 0: when nothing is left
    where: Filter | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Query(Effort):
    """One search: its effort, vector, seeds, class and deadline."""

    vector: Any  # shape (dim,), anything that NumPy takes
    seeds: Sequence[int] | Array = ()  # `Answer.top` of the probe before
    kind: SearchKind = SearchKind.DECODE
    deadline_ms: int | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class SearchAnswer:
    """The nearest rows that a search found, nearest first; equal distances by row."""

    rows: Array  # int64
    distances: Array  # float32; see `inputs.py` for their meaning
    extends: int
    computed: int  # distances
    exact: bool  # every row that may be returned was looked at
    top_keys: Array  # the whole routing list, as keys
    names: list[ExternalId]  # of all rows, in the view that was searched
    waited_ms: float = 0.0  # for a slot

    @property
    def ids(self) -> list[ExternalId]:
        """Return the external ids of `rows`."""
        return [self.names[row] for row in self.rows.tolist()]

    @property
    def top(self) -> Array:
        """Rows of the whole routing list, int64: seeds of the next probe."""
        return self.rows if self.exact else rows_and_distances(self.top_keys)[0]

    def top_ids(self) -> list[ExternalId]:
        """External ids of `top`: seeds that stay right when rows are renumbered."""
        return [self.names[row] for row in self.top.tolist()]
