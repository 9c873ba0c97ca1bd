"""The rows of an index: vectors, external ids, metadata, payloads, and which rows are deleted.

Rows have ascending numbers. An appended row never changes, except that it may be deleted, so views
share this memory. They read a copy of the bit set of live rows, which is made when a view needs it
after a deletion. Not thread-safe: `Index` holds its lock.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from schemas.errors import InvalidRequest
from schemas.rules.metadata import Metadata
from workers.vector.filters.columns import ColumnStore
from workers.vector.filters.filters import CompiledFilters
from workers.vector.filters.parts import ShardedDict
from workers.vector.index.query import ExternalId
from workers.vector.kernels.arrays import WORD_BITS, Array, aligned, pack_bits
from workers.vector.limits import ROWS_MAX

_CAPACITY_MIN = 1_024
ID_BYTES_MAX = 1_024


class Rows:
    """The rows of one index, in arrays that double when they are full."""

    def __init__(
        self,
        vectors: Array,
        ids: list[ExternalId],
        columns: ColumnStore,
        dead: Sequence[int] = (),
        payloads: list[bytes] | None = None,
    ) -> None:
        """Take over the arguments without copies; the first append copies read-only `vectors`."""
        self.vectors, self.columns = vectors, columns
        self.ids, self.payloads = ids, [b""] * len(ids) if payloads is None else payloads
        assert len(self.payloads) == len(self.ids), "a payload for each row"
        self._payload_bytes = sum(len(payload) for payload in self.payloads)
        dead_rows = set(dead)
        self.row_of = ShardedDict[ExternalId]()
        for row, name in enumerate(self.ids):
            if row not in dead_rows:
                self.row_of[name] = row
        assert len(self.row_of) == len(self.ids) - len(dead_rows), "a live id stands twice"
        self.filters = CompiledFilters(columns)
        self.dead_count = len(dead_rows)
        mask = np.zeros(len(vectors), bool)
        mask[list(dead_rows)] = True
        self._dead = pack_bits(mask)
        self._alive: Array | None = None  # cached bit set of live rows, until a deletion

    @property
    def count(self) -> int:
        """Count all rows, deleted ones too."""
        return len(self.ids)

    @property
    def bytes_held(self) -> int:
        """Return the bytes of vectors, metadata and payloads, spare capacity included."""
        return self.vectors.nbytes + self.columns.bytes_held + self._payload_bytes

    def large_objects(self) -> list[list[Any] | ShardedDict[Any]]:
        """Return the containers of objects per row or label, for `parts.release_gradually`."""
        names, labels = self.columns.names.values(), self.columns.labels.values()
        return [self.ids, self.payloads, self.row_of, *names, *labels]

    def append(
        self,
        vectors: Array,
        ids: Sequence[ExternalId],
        metadata: Sequence[Metadata],
        payloads: Sequence[bytes] | None = None,
    ) -> None:
        """Append rows, and delete those that had these ids; raises InvalidRequest if too many."""
        first, count = self.count, self.count + len(ids)
        if count > ROWS_MAX:
            raise InvalidRequest(f"expected at most {ROWS_MAX} rows; compact or shard the index")
        if count > len(self.vectors) or not self.vectors.flags.writeable:
            capacity = max(_CAPACITY_MIN, count, len(self.vectors) * 2)
            larger = aligned(capacity, self.vectors.shape[1], self.vectors.dtype)
            larger[:first] = self.vectors[:first]
            self.vectors = larger
            bits = np.zeros(-(-capacity // WORD_BITS), np.uint32)
            bits[: len(self._dead)] = self._dead
            self._dead, self._alive = bits, None
        self.vectors[first:count] = vectors
        self.columns.append(first, metadata, len(self.vectors))
        self.payloads += [b""] * len(ids) if payloads is None else payloads
        self._payload_bytes += sum(map(len, payloads or ()))
        for row, external in enumerate(ids, first):
            self.delete(external)
            self.row_of[external] = row
            self.ids.append(external)

    def columns_for(self, rows: Sequence[Metadata], leaving: Iterable[ExternalId]) -> ColumnStore:
        """Return the columns without those whose kind new rows change, or the present ones.

        A column is left out only if no live row, other than those `leaving`, has a value in it.
        Views keep the former columns.
        """
        if not (changed := self.columns.kinds_changed(rows)):
            return self.columns
        is_dead = np.unpackbits(self._dead.view(np.uint8), bitorder="little")[: self.count] > 0
        is_dead[[row for name in leaving if (row := self.row_of.get(name)) is not None]] = True
        columns = self.columns
        free = {field for field in changed if is_dead[columns.present(field, 0, self.count)].all()}
        return columns.without(free) if free else columns

    def set_columns(self, columns: ColumnStore) -> None:
        """Replace the columns and drop the filters that were compiled for the old ones."""
        if columns is not self.columns:
            self.columns, self.filters = columns, CompiledFilters(columns)

    def delete(self, external: ExternalId) -> bool:
        """Mark the row of an id as deleted; return whether there was one."""
        row = self.row_of.pop(external, None)
        if row is None:
            return False
        self.dead_count += 1
        self._dead[row // WORD_BITS] |= np.uint32(1 << row % WORD_BITS)
        self._alive = None
        return True

    def alive(self) -> Array | None:
        """Return the bit set of live rows, perhaps with more bits; None if no row is deleted."""
        if self.dead_count and self._alive is None:
            self._alive = ~self._dead
        return self._alive


def check_ids(ids: Sequence[Any], count: int) -> None:
    """Raise InvalidRequest for ids that an index cannot store."""
    if len(ids) != count:
        raise InvalidRequest(f"expected {count} ids, one for each vector, found {len(ids)}", "ids")
    for external in ids:
        if isinstance(external, bool) or not isinstance(external, int | str | bytes):
            raise InvalidRequest(
                f"expected ids that are int, str or bytes, found {type(external).__name__}", "ids"
            )
        if isinstance(external, int):
            if not -(2**63) <= external < 2**63:
                raise InvalidRequest(f"expected ids of 64 bits, found {external}", "ids")
        elif len(_bytes_of(external)) > ID_BYTES_MAX:
            raise InvalidRequest(f"expected ids of at most {ID_BYTES_MAX} bytes", "ids")


def _bytes_of(external: str | bytes) -> bytes:
    try:
        return external.encode() if isinstance(external, str) else external
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"expected ids in UTF-8: {error}", "ids") from error
