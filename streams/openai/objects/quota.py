"""Limits of the objects that callers store, for each tenant and for all. Pure.

Only callers' own objects are refused. Results and progress are always written; otherwise work that
is done would be repeated. So results of batches may exceed a tenant's limit, and then it gets no
new batch. They take nothing from other tenants: equal shares add up to the whole, which is not
checked. Only for tenants with a configured limit, the whole is checked, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.errors import TooManyRequests
from schemas.records import Batch, StoredFile
from streams.openai.objects.table import OF_CALLERS, ObjectRecord, ObjectTable, key_of

_OBJECTS = "files, stores, batches and conversations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of objects and bytes; a tenant's limit of 0 is an equal share of the whole."""

    objects_max: int
    bytes_max: int
    tenants: int = 1
    tenant_objects_max: int = 0
    tenant_bytes_max: int = 0

    def check(self, table: ObjectTable, records: Sequence[ObjectRecord]) -> None:
        """Raise TooManyRequests if a tenant's new records exceed its limits, or the whole."""
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
        check_room(table.objects_of(tenant), len(new), objects_limit, f"{_OBJECTS} of yours")
        if self.tenant_objects_max:
            check_room(table.objects_count(), len(new), self.objects_max, _OBJECTS)
        if size := sum(map(_min_bytes, new)):
            check_room(table.bytes_of(tenant), size, bytes_limit, "bytes of your files")
            if self.tenant_bytes_max:
                check_room(table.bytes_count(), size, self.bytes_max, "bytes of files")


def _min_bytes(record: ObjectRecord) -> int:
    """Return the bytes that a record adds at least; a batch's results are not known yet."""
    if isinstance(record, StoredFile):
        return record.bytes
    return 1 if isinstance(record, Batch) else 0


def check_room(count: int, new_count: int, limit: int, what: str) -> None:
    """Raise TooManyRequests if what a tenant has and adds exceeds a limit together."""
    if count + new_count > limit:
        raise TooManyRequests(
            f"{count} {what} are kept, and {new_count} more would be more than {limit}; delete some"
        )
