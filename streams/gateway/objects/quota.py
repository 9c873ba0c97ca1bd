"""How much callers may keep, each and all together. Pure.

Only what callers make is refused: what tells what has come of it is always written, else work that
is done would be done again. So results of batches may go over a tenant's limit, which then has no
new batch. They take nothing from others: even parts add up to the whole, which nobody is refused
for, and only tenants with a limit of their own have the whole beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.errors import TooManyRequests
from schemas.records import Batch, StoredFile
from streams.gateway.objects.table import OF_CALLERS, ObjectRecord, ObjectTable, key_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits; those of a tenant are 0 for an even part of all."""

    objects_max: int
    bytes_max: int
    tenants: int = 1
    tenant_objects_max: int = 0
    tenant_bytes_max: int = 0

    def check(self, table: ObjectTable, records: Sequence[ObjectRecord]) -> None:
        """Raise TooManyRequests where one tenant's new records are too many, or too much."""
        new = [
            record
            for record in records
            if isinstance(record, OF_CALLERS) and key_of(record) not in table
        ]
        if not new:
            return
        tenant = new[0].tenant
        objects_limit = self.tenant_objects_max or max(1, self.objects_max // self.tenants)
        bytes_limit = self.tenant_bytes_max or max(1, self.bytes_max // self.tenants)
        _check(
            table.objects_of(tenant), len(new), objects_limit, "files, stores and batches of yours"
        )
        if self.tenant_objects_max:
            _check(table.objects_count(), len(new), self.objects_max, "files, stores and batches")
        if size := sum(map(_min_bytes, new)):
            _check(table.bytes_of(tenant), size, bytes_limit, "bytes of your files")
            if self.tenant_bytes_max:
                _check(table.bytes_count(), size, self.bytes_max, "bytes of files")


def _min_bytes(record: ObjectRecord) -> int:
    """Of files that come with a record; how many results a batch will have nobody knows yet."""
    if isinstance(record, StoredFile):
        return record.bytes
    return 1 if isinstance(record, Batch) else 0


def _check(count: int, new_count: int, limit: int, what: str) -> None:
    if count + new_count > limit:
        raise TooManyRequests(
            f"{count} {what} are kept, and {new_count} more would be more than {limit}; delete some"
        )
