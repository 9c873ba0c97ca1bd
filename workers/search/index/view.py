"""An index at one moment: what a search reads, from its first extend to its last.

Nothing in a view changes once it is made. Upserts, deletes, linking and compaction make new views;
searches that run keep theirs, and with it the memory that their slots point to.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from workers.search.index.columns import Columns
from workers.search.index.filters import Allowed, Filter, compiled
from workers.search.index.query import ExternalId
from workers.search.kernels.arrays import Array, address_of, unpacked
from workers.search.kernels.codes import Codes
from workers.search.kernels.metrics import Metric, Storage
from workers.search.walk import fields

COMPILED_MAX = 64  # filters that a view remembers, and ways to search it
LONG = 10_000_000  # comparisons of a filter, about 10 ms
_GROWN = 8  # an index that has grown by this part is audited again


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What the last rounds of `audit.py` found."""

    rows: int  # linked rows then
    entries: int  # entry points after it
    rounds: int
    missed_share: float  # of the rows that the last round searched for

    def is_old(self, rows: int) -> bool:
        """Whether so many linked rows are to be audited again."""
        return rows - self.rows > self.rows // _GROWN


@dataclass(frozen=True, eq=False)
class IndexView:
    """Rows 0 to `count`; those from `linked` on have no edges and are scanned."""

    dim: int
    metric: Metric
    storage: Storage
    count: int
    linked: int
    live: int
    vectors: Array  # (at least count, padded dim)
    graph: Array  # (linked, degree), uint32
    alive: Array | None  # bit set of live rows; None: all
    entries: Array  # rows where searches begin, int64
    ids: list[ExternalId]
    columns: Columns
    epoch: int
    codes: Codes | None = None  # of the linked rows
    audit: Audit | None = None  # of the entry points; None: not made yet
    payloads: list[bytes] = field(default_factory=list)  # of all rows
    ways: dict[Any, Any] = field(default_factory=dict)  # of `ways.py`
    _filters: dict[str, Allowed] = field(default_factory=dict)

    @cached_property
    def entry_vectors(self) -> Array:
        """Vectors of `entries`, side by side."""
        return np.ascontiguousarray(self.vectors[self.entries])

    @cached_property
    def entry_codes(self) -> Array:
        """Codes of `entries`, side by side."""
        assert self.codes is not None
        return np.ascontiguousarray(self.codes.codes[self.entries])

    @cached_property
    def template(self) -> Array:
        """A slot's row with all that concerns the index."""
        row = np.zeros(fields.COUNT, np.int64)
        row[fields.STATUS] = fields.FRESH
        row[fields.VECTORS], row[fields.ROW_BYTES] = (
            address_of(self.vectors),
            self.vectors.strides[0],
        )
        row[fields.LENGTH] = self.vectors.shape[1]
        row[fields.METRIC], row[fields.STORED] = self.metric.number, self.storage.number
        row[fields.GRAPH], row[fields.DEGREE] = address_of(self.graph), self.graph.shape[1]
        row[fields.LOOSE_FIRST], row[fields.LOOSE_LAST] = self.linked, self.count
        row[fields.REPS], row[fields.REPS_COUNT] = address_of(self.entries), len(self.entries)
        row[fields.REPS_VECTORS] = address_of(self.entry_vectors)
        row[fields.SCREENED] = self.alive is not None or self.linked < self.count
        if self.codes is not None:
            row[fields.CODES], row[fields.CODE_BYTES] = (
                address_of(self.codes.codes), self.codes.codes.shape[1]
            )  # fmt: skip
            row[fields.RULER] = address_of(self.codes.ruler)
            row[fields.REPS_CODES] = address_of(self.entry_codes)
        if self.alive is not None:
            row[fields.ALIVE] = address_of(self.alive)
        return row

    def linked_part(self, graph: Array, entries: Array, coded: Codes | None) -> "IndexView":
        """Nothing but the first rows, deleted or not, with this graph over them."""
        return replace(
            self, count=len(graph), linked=len(graph), live=len(graph), graph=graph, alive=None,
            entries=entries, ids=[], columns=Columns(), codes=coded, ways={}, _filters={},
            payloads=[],
        )  # fmt: skip

    def takes_long(self, where: Filter) -> bool:
        """Whether `allowed` would hold up whoever else waits for this thread."""
        return where.values_count * self.count > LONG and repr(where) not in self._filters

    def allowed(self, where: Filter) -> Allowed:
        """A filter compiled for these rows; raises UnknownFilterField."""
        key = repr(where)  # equal values of different kinds, as 1 and True, are different filters
        if (known := self._filters.get(key)) is None:
            known = compiled(where, self.columns, self.alive, self.count)
            while len(self._filters) >= COMPILED_MAX:
                self._filters.pop(next(iter(self._filters)), None)
            self._filters[key] = known
        return known

    def live_rows(self) -> Array:
        """Rows that are not deleted, ascending, int64."""
        if self.alive is None:
            return np.arange(self.count)
        return np.flatnonzero(unpacked(self.alive, self.count))
