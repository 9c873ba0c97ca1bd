"""What callers keep here, as the log has it: files, vector stores, files of stores, batches. Pure.

One key has one writer at a time by its nature: what callers want is apart from what has come of it,
so that neither overwrites the other. Of one key the last record counts. Tenants are part of every
key; whoever asks for another's object finds none.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from schemas.records import (
    Batch,
    BatchProgress,
    FileBatch,
    StoredFile,
    StoreFile,
    StoreFileResult,
    StoreUsed,
    VectorStore,
)
from schemas.topics import object_key
from streams.gateway.objects import batches

DAY_MS = 86_400_000
UPLOADING, STORED, DELETED = "uploading", "stored", "deleted"  # of a file
PRESENT, CANCELLED = "present", "cancelled"  # or deleted: what is wanted of a store's file
IN_PROGRESS, COMPLETED, FAILED = "in_progress", "completed", "failed"
STATUSES = (IN_PROGRESS, COMPLETED, FAILED, CANCELLED)
RESULT, USED = "result", "used"  # last parts of keys
OfStore = VectorStore | StoreUsed | StoreFile | StoreFileResult | FileBatch
Kept = StoredFile | OfStore | Batch | BatchProgress


def key_of(record: Kept) -> str:
    """The key under which a record stands on `objects`."""
    match record:
        case StoredFile():
            return object_key(record.tenant, record.file_id)
        case VectorStore():
            return object_key(record.tenant, record.store_id)
        case StoreUsed():
            return object_key(record.tenant, record.store_id, USED)
        case StoreFile():
            return object_key(record.tenant, record.store_id, record.file_id)
        case StoreFileResult():
            return object_key(record.tenant, record.store_id, record.file_id, RESULT)
        case FileBatch():
            return object_key(record.tenant, record.store_id, record.batch_id)
        case Batch():
            return batches.batch_key(record.tenant, record.batch_id)
        case BatchProgress():
            return batches.progress_key(record.tenant, record.batch_id)


@dataclass(slots=True)
class Entry:
    """A file of a store: what is wanted, and what has come of that."""

    wanted: StoreFile
    result: StoreFileResult | None = None

    @property
    def status(self) -> str:
        """As callers see it."""
        if self.wanted.wanted == CANCELLED:
            return CANCELLED
        if self.result is None or self.result.revision != self.wanted.revision:
            return IN_PROGRESS
        return self.result.status

    @property
    def is_done(self) -> bool:
        """Whether what is on the log is what is wanted, as long as the store is there."""
        if self.wanted.wanted == CANCELLED:
            return self.result is None or not self.result.documents
        return self.wanted.wanted == PRESENT and self.status != IN_PROGRESS


@dataclass(slots=True)
class _Store:
    record: VectorStore | None = None
    used_ms: int = 0
    files: dict[str, StoreFile] = field(default_factory=dict)
    results: dict[str, StoreFileResult] = field(default_factory=dict)
    batches: dict[str, FileBatch] = field(default_factory=dict)

    def is_empty(self) -> bool:
        return not (self.record or self.files or self.results or self.batches or self.used_ms)


class Table:
    """Everything by tenant and id; `apply` records in the order of the log."""

    def __init__(self) -> None:
        self.batches = batches.BatchTable()
        self._files: dict[tuple[str, str], StoredFile] = {}
        self._stores: dict[tuple[str, str], _Store] = {}
        self._keys: set[str] = set()
        self._undone: set[tuple[str, str, str]] = set()  # tenant, store and file

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def apply(self, key: str, record: Kept | None) -> None:
        """One record; None: the key is no more. What stands under another's key is no record."""
        if record is None:
            self._keys.discard(key)
            self._drop(key.split("/"))
        elif key == key_of(record):
            self._keys.add(key)
            self._set(record)
        self._judge(key.split("/"))

    def _judge(self, names: list[str]) -> None:
        """Note which files of stores something is to be done about."""
        tenant, store_id, *rest = [*names, ""]
        store = self._stores.get((tenant, store_id), _Store())
        is_there = store.record is not None and not store.record.deleted
        for file_id in list(store.files) if rest == [""] else [rest[0]]:
            place, wanted = (tenant, store_id, file_id), store.files.get(file_id)
            entry = Entry(wanted, store.results.get(file_id)) if wanted is not None else None
            if entry is None or (is_there and entry.is_done):
                self._undone.discard(place)
            else:
                self._undone.add(place)

    def _set(self, record: Kept) -> None:
        if isinstance(record, StoredFile):
            self._files[record.tenant, record.file_id] = record
            return
        if isinstance(record, Batch | BatchProgress):
            self.batches.set(record)
            return
        store = self._stores.setdefault((record.tenant, record.store_id), _Store())
        match record:
            case VectorStore():
                store.record = record
            case StoreUsed():
                store.used_ms = record.at_ms
            case StoreFile():
                store.files[record.file_id] = record
            case StoreFileResult():
                store.results[record.file_id] = record
            case FileBatch():
                store.batches[record.batch_id] = record

    def _drop(self, names: list[str]) -> None:
        match names:
            case [tenant, name] if (tenant, name) in self._files:
                del self._files[tenant, name]
            case [tenant, name, *rest] if name.startswith(batches.PREFIX):
                self.batches.drop(tenant, name, *rest)
            case [tenant, store_id, *rest] if store := self._stores.get((tenant, store_id)):
                match rest:
                    case []:
                        store.record = None
                    case [one] if one == USED:
                        store.used_ms = 0
                    case [one]:
                        store.files.pop(one, None)
                        store.batches.pop(one, None)
                    case [one, _]:
                        store.results.pop(one, None)
                if store.is_empty():
                    del self._stores[tenant, store_id]

    # Asked by endpoints

    def file(self, tenant: str, file_id: str) -> StoredFile | None:
        """A file whose upload is complete."""
        found = self._files.get((tenant, file_id))
        return found if found is not None and found.state == STORED else None

    def files(self, tenant: str) -> list[StoredFile]:
        """All of a tenant's."""
        return [
            each
            for (owner, _), each in self._files.items()
            if owner == tenant and each.state == STORED
        ]

    def batch_file(self, batch: Batch) -> StoredFile | None:
        """The file of a batch's calls; until the batch ends it is there, even if deleted."""
        found = self._files.get((batch.tenant, batch.input_file_id))
        return found if found is not None and found.state in (STORED, DELETED) else None

    def store(self, tenant: str, store_id: str) -> VectorStore | None:
        """A store that its owner has not deleted."""
        found = self._stores.get((tenant, store_id))
        record = found.record if found is not None else None
        return record if record is not None and not record.deleted else None

    def stores(self, tenant: str) -> list[VectorStore]:
        """All of a tenant's."""
        owned = (each.record for (owner, _), each in self._stores.items() if owner == tenant)
        return [each for each in owned if each is not None and not each.deleted]

    def used_ms(self, store: VectorStore) -> int:
        """When a store was last used."""
        found = self._stores.get((store.tenant, store.store_id))
        return max(store.created_ms, found.used_ms if found is not None else 0)

    def expires_ms(self, store: VectorStore) -> int | None:
        """When a store expires, if it ever does."""
        days = store.expires_days
        return self.used_ms(store) + days * DAY_MS if days else None

    def entry(self, store: VectorStore, file_id: str) -> Entry | None:
        """A file of a store."""
        found = self._stores.get((store.tenant, store.store_id))
        wanted = found.files.get(file_id) if found is not None else None
        if found is None or wanted is None or wanted.wanted == DELETED:
            return None
        return Entry(wanted, found.results.get(file_id))

    def revision(self, store: VectorStore, file_id: str) -> int:
        """Of what was last wanted of a file, 0 for nothing."""
        found = self._stores.get((store.tenant, store.store_id), _Store()).files.get(file_id)
        return found.revision if found is not None else 0

    def entries(self, store: VectorStore, batch_id: str = "") -> list[Entry]:
        """All files of a store, or of one batch."""
        found = self._stores.get((store.tenant, store.store_id), _Store())
        return [
            Entry(each, found.results.get(each.file_id))
            for each in found.files.values()
            if each.wanted != DELETED and batch_id in ("", each.batch_id)
        ]

    def batch(self, store: VectorStore, batch_id: str) -> FileBatch | None:
        """A batch of a store."""
        found = self._stores.get((store.tenant, store.store_id))
        return found.batches.get(batch_id) if found is not None else None

    def without_file(self, file: StoredFile) -> list[Kept]:
        """What is to be written for a file to be deleted: it goes from all stores, too."""
        entries = (self.entry(store, file.file_id) for store in self.stores(file.tenant))
        return [replace(file, state=DELETED), *_gone(each for each in entries if each)]

    def without_files(self, store: VectorStore) -> list[Kept]:
        """Likewise for a store to be emptied."""
        return _gone(self.entries(store))

    # Asked by whoever does what callers wish

    def undone(self) -> Iterator[tuple[VectorStore | None, Entry]]:
        """Files of stores of which the log does not have what is wanted; None: their store is no
        more."""
        for tenant, store_id, file_id in sorted(self._undone):
            found = self._stores[tenant, store_id]
            entry = Entry(found.files[file_id], found.results.get(file_id))
            yield self.store(tenant, store_id), entry

    def deleted_stores(self) -> Iterator[VectorStore]:
        """Those of which no file is left."""
        for store in list(self._stores.values()):
            if store.record is not None and store.record.deleted and not store.files:
                yield store.record

    def keys_of(self, store: VectorStore) -> Iterable[str]:
        """All keys below that of a store, and then its own."""
        found = self._stores[store.tenant, store.store_id]
        kept: list[Kept] = [*found.results.values(), *found.files.values()]
        kept += found.batches.values()
        keys = [key_of(each) for each in kept]
        return [*keys, object_key(store.tenant, store.store_id, USED), key_of(store)]

    def every_store(self) -> list[VectorStore]:
        """Of all tenants, those not deleted."""
        records = (each.record for each in self._stores.values())
        return [each for each in records if each is not None and not each.deleted]

    def every_file(self) -> list[StoredFile]:
        """Of all tenants, whatever their state."""
        return list(self._files.values())


def _gone(entries: Iterable[Entry]) -> list[Kept]:
    return [
        replace(each.wanted, wanted=DELETED, revision=each.wanted.revision + 1) for each in entries
    ]
