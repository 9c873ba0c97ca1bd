"""Batches of calls as the log has them: the callers' records, and their progress. Pure.

Any gateway writes a `Batch` for its caller. The gateway that runs batches writes `BatchProgress`
(`streams/openai/batches`).
"""

from collections import Counter
from collections.abc import Iterator, Set
from itertools import chain

from schemas.records import Batch, BatchProgress, StoredFile
from schemas.topics import object_key
from streams.openai.objects.ordered_ids import OrderedIds

PREFIX, PROGRESS = "batch_", "progress"  # of ids, and the last part of keys
VALIDATING, IN_PROGRESS, CANCELLING = "validating", "in_progress", "cancelling"
FAILED, COMPLETED, EXPIRED, CANCELLED = "failed", "completed", "expired", "cancelled"
ENDED = (FAILED, COMPLETED, EXPIRED, CANCELLED)
Name = tuple[str, str]  # tenant and batch


def batch_key(tenant: str, batch_id: str) -> str:
    """Build the key of a batch's record."""
    return object_key(tenant, batch_id)


def progress_key(tenant: str, batch_id: str) -> str:
    """Build the key of a batch's progress."""
    return object_key(tenant, batch_id, PROGRESS)


def line_key(batch: Batch, line: int, custom_id: str) -> str:
    """Build the key of a line's prompt and answer; bridges send the request in the name of its
    tenant."""
    return object_key(batch.tenant, batch.batch_id, str(line), custom_id)


def tenant_of(key: str) -> str:
    """Return the tenant that a key belongs to."""
    return key.partition("/")[0]


class BatchTable:
    """The batches of all tenants, by tenant and id."""

    def __init__(self) -> None:
        self._batches: dict[Name, Batch] = {}
        self._progress: dict[Name, BatchProgress] = {}
        # Ids of open batches, by whether they have started, and by tenant.
        self._open_orders: dict[bool, dict[str, OrderedIds]] = {True: {}, False: {}}
        self._orders: dict[str, OrderedIds] = {}  # by tenant
        self._needed: Counter[Name] = Counter()  # input files of open batches

    def set(self, record: Batch | BatchProgress) -> None:
        """Apply a record; the last record of a key counts."""
        name = record.tenant, record.batch_id
        self._untrack(name)
        if isinstance(record, Batch):
            self._batches[name] = record
            self._orders.setdefault(record.tenant, OrderedIds()).add(
                record.batch_id, record.created_ms
            )
        else:
            self._progress[name] = record
        self._track_if_open(name)

    def drop(self, tenant: str, batch_id: str, *rest: str) -> None:
        """Remove the batch, or its progress, whose key was deleted."""
        name = tenant, batch_id
        self._untrack(name)
        (self._progress if rest else self._batches).pop(name, None)
        if not rest:
            self._orders.get(tenant, OrderedIds()).drop(batch_id)
        self._track_if_open(name)

    def _untrack(self, name: Name) -> None:
        tenant, batch_id = name
        for orders in self._open_orders.values():
            if batch_id not in (order := orders.get(tenant, OrderedIds())):
                continue
            order.drop(batch_id)
            if not order:
                del orders[tenant]
            file = name[0], self._batches[name].input_file_id
            self._needed[file] -= 1
            if not self._needed[file]:
                del self._needed[file]

    def _track_if_open(self, name: Name) -> None:
        progress = self._progress.get(name)
        if name in self._batches and (progress is None or progress.status not in ENDED):
            order = self._open_orders[progress is not None].setdefault(name[0], OrderedIds())
            order.add(name[1], self._batches[name].created_ms)
            self._needed[name[0], self._batches[name].input_file_id] += 1

    def get(self, tenant: str, batch_id: str) -> Batch | None:
        """Return a batch by tenant and id."""
        return self._batches.get((tenant, batch_id))

    def order(self, tenant: str) -> OrderedIds:
        """Return the ids of a tenant's batches in order."""
        return self._orders.get(tenant, OrderedIds())

    def progress(self, batch: Batch) -> BatchProgress | None:
        """Return the progress of a batch; None if its file was not checked yet."""
        return self._progress.get((batch.tenant, batch.batch_id))

    def is_open(self, tenant: str, batch_id: str) -> bool:
        """Return whether a batch has not ended."""
        return any(batch_id in orders.get(tenant, ()) for orders in self._open_orders.values())

    def open_tenants(self) -> Set[str]:
        """Return the tenants that have open batches."""
        return self._open_orders[True].keys() | self._open_orders[False].keys()

    def open_batches(self, tenant: str) -> Iterator[Batch]:
        """Iterate over a tenant's open batches: those started first, then by age."""
        orders = [
            self._open_orders[is_begun].get(tenant, OrderedIds()) for is_begun in (True, False)
        ]
        names = chain.from_iterable(order.beyond(None, newer=True) for order in orders)
        return (self._batches[tenant, name] for name in names)

    def started_batches(self) -> list[Batch]:
        """List the batches of all tenants that have started and not ended."""
        return [
            self._batches[tenant, name]
            for tenant, order in self._open_orders[True].items()
            for name in order.beyond(None, newer=True)
        ]

    def status(self, batch: Batch) -> str:
        """Return the status that callers see."""
        progress = self.progress(batch)
        if progress is not None and progress.status in ENDED:
            return progress.status
        if batch.cancelled_ms:
            return CANCELLING
        return progress.status if progress is not None else VALIDATING

    def needs(self, file: StoredFile) -> bool:
        """Return whether an open batch reads the file, even if its caller has deleted it."""
        return (file.tenant, file.file_id) in self._needed

    def is_given_up(self, key: str, now_ms: int) -> bool:
        """Return whether the answer to a line is no longer needed, by its prompt's key.

        An answer for a batch that this table has not read yet is needed.
        """
        tenant, _, rest = key.partition("/")
        name = tenant, rest.partition("/")[0]
        if (batch := self._batches.get(name)) is None:
            return False
        is_over = batch.cancelled_ms > 0 or batch.expires_ms <= now_ms
        return is_over or not self.is_open(*name)
