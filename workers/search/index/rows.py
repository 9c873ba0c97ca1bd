"""Rows of an index: vectors, external ids, metadata, payloads, and which rows are deleted.

Rows are numbers that count up; a row never changes once it is appended, only its bit in `dead`, so
views share this memory. Not safe for several threads: `Index` holds its lock.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from schemas.errors import InvalidRequest
from workers.search.index.columns import Columns, Value
from workers.search.index.query import ExternalId
from workers.search.kernels.arrays import Array, aligned, all_but
from workers.search.limits import ROWS_MAX

_CAPACITY_MIN = 1_024
ID_BYTES_MAX = 1_024


class Rows:
    """Arrays that grow; they double when they are full."""

    def __init__(
        self,
        vectors: Array,
        ids: Sequence[ExternalId],
        columns: Columns,
        dead: Sequence[int] = (),
        payloads: Sequence[bytes] | None = None,
    ) -> None:
        """`vectors` is stored as it is and may be read-only; the first append then copies it."""
        self.vectors, self.columns = vectors, columns
        self.ids: list[ExternalId] = list(ids)
        self.payloads = [b""] * len(self.ids) if payloads is None else list(payloads)
        assert len(self.payloads) == len(self.ids), "a payload for each row"
        self.dead = list(dead)
        gone = set(self.dead)
        self.row_of = {name: row for row, name in enumerate(self.ids) if row not in gone}
        assert len(self.row_of) == len(self.ids) - len(gone), "a live id stands twice"

    @property
    def count(self) -> int:
        """Rows, deleted ones too."""
        return len(self.ids)

    def append(
        self,
        vectors: Array,
        ids: Sequence[ExternalId],
        metadata: Sequence[Mapping[str, Value]],
        payloads: Sequence[bytes] | None = None,
    ) -> None:
        """Add rows; those that had these ids before are deleted."""
        first, count = self.count, self.count + len(ids)
        if count > ROWS_MAX:
            raise InvalidRequest(f"expected at most {ROWS_MAX} rows; compact or shard the index")
        if count > len(self.vectors) or not self.vectors.flags.writeable:
            capacity = max(_CAPACITY_MIN, count, len(self.vectors) * 2)
            grown = aligned(capacity, self.vectors.shape[1], self.vectors.dtype)
            grown[:first] = self.vectors[:first]
            self.vectors = grown
        self.vectors[first:count] = vectors
        self.columns.append(first, metadata, len(self.vectors))
        self.payloads += [b""] * len(ids) if payloads is None else payloads
        for row, external in enumerate(ids, first):
            self.delete(external)
            self.row_of[external] = row
            self.ids.append(external)

    def delete(self, external: ExternalId) -> bool:
        """Mark the row of an id as deleted; whether there was one."""
        row = self.row_of.pop(external, None)
        if row is None:
            return False
        self.dead.append(row)
        return True

    def alive(self) -> Array | None:
        """The bit set of live rows, or None where no row was deleted."""
        return all_but(np.array(self.dead), self.count) if self.dead else None


def check_ids(ids: Sequence[Any], count: int) -> None:
    """Raise InvalidRequest for ids that an index cannot keep."""
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
