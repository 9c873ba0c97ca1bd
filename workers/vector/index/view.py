"""An immutable view of an index, which a search reads from its first extend to its last.

Upserts, deletes, linking and compaction make new views. A running search keeps its view alive, and
with it the memory that its slot points to.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from workers.vector.filters.columns import ColumnStore
from workers.vector.filters.filters import COMPILED_MAX, AllowedRows, CompiledFilters, Filter
from workers.vector.graph import duplicates
from workers.vector.graph.links import GraphLinks
from workers.vector.graph.versions import GraphVersion
from workers.vector.index.query import ExternalId
from workers.vector.kernels.arrays import Array, address_of, are_in, pack_bits, unpack_bits
from workers.vector.kernels.codes import Codes
from workers.vector.kernels.keys import NOWHERE
from workers.vector.kernels.metrics import Metric, Storage
from workers.vector.kernels.panels import PANEL_DIM_MAX, pad_to_panel, panels
from workers.vector.traversal import fields

PLANS_MAX = 64  # plans that a view caches
LONG = 1_000_000  # comparisons of a filter, about 1 ms
UNCALIBRATED = 128  # entries of the routing list for any target recall, without measurements
_OF_ENTRIES: tuple[str, ...] = ("seeds", "entry_panels", "entry_vectors")
_OF_CODES, _OF_NODES = ("entry_codes", "entry_outliers"), ("nodes", "node_panels")
NODES_MAX = 4_096  # most distinct vectors that a search may measure without a walk
_GROWN = 8  # an index that has grown by one part in this many is audited again
_LEAST_MISSED = 1e-4
_GROWN_EFFORTS = 1.5  # growth of rows after which recall of routing lists is measured again
_COMPARED, _WITHIN = (16, 32, 64), 0.002  # list lengths to compare graphs at, and their tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexAudit:
    """The results of the last audit by `audit.py`."""

    rows: int  # linked rows at that time
    entries: int  # entry points after the audit
    rounds: int
    missed_share: float  # of the rows that the last round searched for
    calibrated: int = 0  # linked rows when `efforts` were measured
    # length of a routing list, and its recall of the 10 and the 100 nearest of held-out rows
    efforts: tuple[tuple[int, float, float], ...] = ()

    def is_old(self, rows: int) -> bool:
        """Return whether an index of this many linked rows is to be audited again."""
        return rows - self.rows > self.rows // _GROWN

    def is_uncalibrated(self, rows: int) -> bool:
        """Return whether this many linked rows require a new measurement of `efforts`."""
        return rows > _GROWN_EFFORTS * self.calibrated

    def recall_at(self, length: int) -> float:
        """Return the recall of the 10 nearest at this list length; 1 if it was not measured."""
        return next((point[1] for point in self.efforts if point[0] == length), 1.0)

    def serves_as_well_as(self, full: "IndexAudit") -> bool:
        """Return whether this graph, with few edges, finds as much as the full one."""
        return bool(self.efforts) and all(
            self.recall_at(length) >= full.recall_at(length) - _WITHIN for length in _COMPARED
        )

    def top_m(self, recall: float, k: int, limit: int) -> int:
        """Return the length of the shortest routing list with this recall of the k nearest.

        It interpolates the measurements: the logarithm of the missed share against that of the
        length is close to a line.
        """
        column, measured_k = (1, 10) if k <= 10 else (2, 100)
        points = [point for point in self.efforts if point[column] > 0]
        if not points:
            return min(UNCALIBRATED, limit)
        missed = [-math.log(max(_LEAST_MISSED, 1 - point[column])) for point in points]
        lengths = [math.log(point[0]) for point in points]
        target = -math.log(max(_LEAST_MISSED, 1 - recall))
        length = math.exp(np.interp(target, np.maximum.accumulate(missed), lengths))
        return min(limit, math.ceil(length * max(1.0, k / measured_k)))


@dataclass(frozen=True, eq=False)
class IndexView:
    """Rows 0 to `count` of an index; those from `linked` on have no edges and are scanned."""

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
    chain: Array | None  # (linked, 1), uint32: chains of equal rows; None: there are none
    versions: tuple[GraphVersion, ...]  # of the graph, then of the chain
    ids: list[ExternalId]
    columns: ColumnStore
    filters: CompiledFilters  # over `columns`
    epoch: int
    codes: Codes | None = None  # of the linked rows
    audit: IndexAudit | None = None  # of the entry points; None: not audited yet
    payloads: list[bytes] = field(default_factory=list)  # of all rows
    is_walked: bool = False  # whether all searches walk, even if there are few nodes
    plans: dict[Any, Any] = field(default_factory=dict)  # the cache of `plans.py`
    _allowed: dict[str, AllowedRows] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> Array | None:
        """Return all nodes, int64; None if they are too many or too long to measure all."""
        if self.is_walked or not self.linked or self.vectors.shape[1] > PANEL_DIM_MAX:
            return None
        if duplicates.node_count(self.chain, self.linked) > NODES_MAX:
            return None
        return pad_to_panel(duplicates.nodes(self.chain, self.linked))

    @cached_property
    def node_panels(self) -> Array:
        """Return the vectors of `nodes` in panels."""
        return panels(self.vectors[self.nodes], self.dim)

    @cached_property
    def seeds(self) -> Array:
        """Return the entry points, in memory that is padded to whole panels."""
        return pad_to_panel(self.entries)

    @cached_property
    def entry_vectors(self) -> Array:
        """Return the vectors of `seeds` as a contiguous array."""
        return np.ascontiguousarray(self.vectors[self.seeds])

    @cached_property
    def entry_panels(self) -> Array:
        """Return the vectors of `seeds` in panels."""
        return panels(self.vectors[self.seeds], self.dim)

    @cached_property
    def entry_codes(self) -> Array:
        """Return the codes of `seeds` as a contiguous array."""
        assert self.codes is not None
        return np.ascontiguousarray(self.codes.codes[self.seeds])

    @cached_property
    def entry_outliers(self) -> Array | None:
        """Return the bit set of places in `seeds` whose rows are outliers of the codes."""
        if self.codes is None or self.codes.outliers is None:
            return None
        return pack_bits(are_in(self.codes.outliers, self.seeds))

    @cached_property
    def template(self) -> Array:
        """Return a slot's row with all columns of the index, int64 (fields.COUNT,)."""
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
        row[fields.REPS], row[fields.REPS_COUNT] = address_of(self.seeds), len(self.seeds)
        if row[fields.LENGTH] <= PANEL_DIM_MAX:
            row[fields.REPS_PANELS] = address_of(self.entry_panels)
            row[fields.REPS_DIMS] = self.entry_panels.shape[1]
        else:
            row[fields.REPS_VECTORS] = address_of(self.entry_vectors)
        row[fields.SCREENED] = self.alive is not None or self.linked < self.count
        if self.chain is not None:
            row[fields.CHAIN] = address_of(self.chain)
        if self.codes is not None:
            row[fields.CODES], row[fields.CODE_BYTES] = (
                address_of(self.codes.codes), self.codes.codes.shape[1]
            )  # fmt: skip
            row[fields.QUANTIZER] = address_of(self.codes.quantizer)
            if self.codes.outliers is not None:
                row[fields.OUTLIERS] = address_of(self.codes.outliers)
            if row[fields.REPS_VECTORS]:
                row[fields.REPS_CODES] = address_of(self.entry_codes)
                if self.entry_outliers is not None:
                    row[fields.REPS_OUTLIERS] = address_of(self.entry_outliers)
        if self.alive is not None:
            row[fields.ALIVE] = address_of(self.alive)
        return row

    @property
    def links(self) -> GraphLinks:
        """Return the links of the view's linked rows."""
        return GraphLinks(self.graph, self.entries, self.chain, self.versions)

    def linked_part(self, links: GraphLinks, coded: Codes | None) -> "IndexView":
        """Return a view of the linked rows only, deleted ones too, with these links."""
        rows = len(links.graph)
        return replace(
            self, **links._asdict(), count=rows, linked=rows, live=rows, alive=None, ids=[],
            columns=ColumnStore(), codes=coded, plans={}, _allowed={},
            filters=CompiledFilters(ColumnStore()), payloads=[],
        )  # fmt: skip

    def ready(self, before: "IndexView | None") -> "IndexView":
        """Compute the cached properties that the first search needs, and return this view.

        Those of `before` are reused if the entry points are the same.
        """
        if before is not None and before.entries is self.entries:
            are_alike = before.linked == self.linked and before.chain is self.chain
            names = _OF_ENTRIES + (_OF_CODES if before.codes is self.codes else ())
            names += _OF_NODES if are_alike else ()
            cached = {name: before.__dict__[name] for name in names if name in before.__dict__}
            self.__dict__.update(cached)
        assert len(self.template)
        assert self.nodes is None or len(self.node_panels)
        return self

    def takes_long(self, where: Filter) -> bool:
        """Return whether `allowed` would block an event loop for too long."""
        return self.filters.comparisons(where, self.count) > LONG

    def allowed(self, where: Filter) -> AllowedRows:
        """Compile a filter for these rows, or return it cached; raises UnknownFilterField."""
        key = repr(where)
        if (allowed := self._allowed.get(key)) is None:
            allowed = self.filters.allowed(where, self.alive, self.count)
            while len(self._allowed) >= COMPILED_MAX:
                self._allowed.pop(next(iter(self._allowed)), None)
            self._allowed[key] = allowed
        return allowed

    def nodes_to_find(self, first: int, last: int) -> Array:
        """Return nodes from `first` to `last` that are live or have copies: ascending, int64."""
        rows = duplicates.nodes(self.chain, self.linked)
        rows = rows[(rows >= first) & (rows < last)]
        if self.alive is None:
            return rows
        are_live = are_in(self.alive, rows)
        if self.chain is not None:
            are_live |= self.chain[rows, 0] != NOWHERE
        return rows[are_live]

    def live_rows(self) -> Array:
        """Return the rows that are not deleted, ascending, int64."""
        if self.alive is None:
            return np.arange(self.count)
        return np.flatnonzero(unpack_bits(self.alive, self.count))
