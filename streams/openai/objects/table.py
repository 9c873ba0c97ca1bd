"""Callers' objects as the log has them: files, vector stores, batches, conversations. Pure.

Each key has one writer at a time: desired states and results have separate keys, so neither
overwrites the other. The last record of a key counts. Tenants are part of every key; a caller who
names another tenant's object finds none.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace

from schemas.records import (
    Batch,
    BatchProgress,
    FileBatch,
    PendingTurn,
    StoredConversation,
    StoredFile,
    StoredItem,
    StoreFile,
    StoreFileResult,
    StoreUsed,
    VectorStore,
)
from schemas.topics import object_key
from streams.calls.ids import STORE_PREFIX
from streams.openai.objects import batches, conversations
from streams.openai.objects.ordered_ids import OrderedIds
from streams.openai.objects.stores import DELETED, PRESENT, Store, StoreEntry

DAY_MS = 86_400_000
UPLOADING, STORED = "uploading", "stored"  # states of a file, besides deleted
RESULT, USED = "result", "used"  # last parts of keys
OfStore = VectorStore | StoreUsed | StoreFile | StoreFileResult | FileBatch
OfConversation = StoredConversation | StoredItem | PendingTurn
ObjectRecord = StoredFile | OfStore | Batch | BatchProgress | OfConversation
# Records that count as a caller's objects; the other records are results of these.
OF_CALLERS = (StoredFile, VectorStore, StoreFile, FileBatch, Batch, StoredConversation)
FileKey = tuple[str, str, str]  # tenant, store and file


def key_of(record: ObjectRecord) -> str:
    """Return the key of a record on `objects`."""
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
        case StoredConversation() | StoredItem() | PendingTurn():
            return conversations.conversation_key(record)


class ObjectTable:
    """All objects by tenant and id; `apply` takes records in the order of the log."""

    def __init__(self) -> None:
        self.batches = batches.BatchTable()
        self.conversations = conversations.ConversationTable()
        self._files: dict[str, dict[str, StoredFile]] = {}
        self._stores: dict[str, dict[str, Store]] = {}
        self._file_order: dict[str, OrderedIds] = {}  # of uploaded files; kinds are purposes
        self._store_order: dict[str, OrderedIds] = {}  # of stores that are not deleted
        self._keys: dict[str, bool] = {}  # by key: whether it is a caller's object
        self._objects: Counter[str] = Counter()  # callers', by tenant
        self._bytes: Counter[str] = Counter()  # of files, by tenant
        # By tenant, files of stores whose desired state is not reached: those to be present (True),
        # and those to be removed (False); first come, first served.
        self._pending: dict[bool, dict[str, dict[FileKey, None]]] = {True: {}, False: {}}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def objects_of(self, tenant: str) -> int:
        """Return the number of a tenant's objects."""
        return self._objects[tenant]

    def objects_count(self) -> int:
        """Count the objects of all tenants."""
        return self._objects.total()

    def bytes_of(self, tenant: str) -> int:
        """Return the bytes of a tenant's files, including those being uploaded or deleted."""
        return self._bytes[tenant]

    def bytes_count(self) -> int:
        """Count the bytes of all tenants' files."""
        return self._bytes.total()

    def apply(self, key: str, record: ObjectRecord | None) -> None:
        """Apply a record; None is a deleted key. A record under another record's key is ignored."""
        names = key.split("/")
        if record is None:
            if self._keys.pop(key, False):
                self._add(self._objects, names[0], -1)
            self._drop(names)
        elif key == key_of(record):
            if key not in self._keys:
                self._keys[key] = isinstance(record, OF_CALLERS)
                self._add(self._objects, names[0], self._keys[key])
            self._set(record)
        if len(names) > 2 and names[1].startswith(STORE_PREFIX):
            self._update_pending((names[0], names[1], names[2]))

    @staticmethod
    def _add(sums: Counter[str], tenant: str, amount: int) -> None:
        sums[tenant] += amount
        if not sums[tenant]:
            del sums[tenant]

    def _update_pending(self, place: FileKey) -> None:
        """Update whether work is left to do for a file of a store."""
        tenant, store_id, file_id = place
        store = self._store(tenant, store_id)
        spec = store.files.get(file_id)
        entry = StoreEntry(spec, store.results.get(file_id)) if spec is not None else None
        is_done = entry is None or (store.is_there and entry.is_done)
        is_present = store.is_there and spec is not None and spec.target_state == PRESENT
        for kind, pending in self._pending.items():
            if not is_done and kind is is_present:
                pending.setdefault(tenant, {}).setdefault(place)
            elif tenant in pending:
                pending[tenant].pop(place, None)
                if not pending[tenant]:
                    del pending[tenant]

    def _store(self, tenant: str, store_id: str) -> Store:
        return self._stores.get(tenant, {}).get(store_id) or Store()

    def _set(self, record: ObjectRecord) -> None:
        if isinstance(record, StoredFile):
            self._set_file(record)
            return
        if isinstance(record, Batch | BatchProgress):
            self.batches.set(record)
            return
        if isinstance(record, OfConversation):
            self.conversations.set(record)
            return
        stores = self._stores.setdefault(record.tenant, {})
        store = stores.setdefault(record.store_id, Store())
        match record:
            case VectorStore():
                self._set_store(store, record)
            case StoreUsed():
                store.used_ms = record.at_ms
            case StoreFile():
                store.put_file(record)
            case StoreFileResult():
                store.put_result(record)
            case FileBatch():
                store.batches[record.batch_id] = record

    def _set_file(self, record: StoredFile) -> None:
        self._drop_file(record.tenant, record.file_id)
        self._files.setdefault(record.tenant, {})[record.file_id] = record
        self._add(self._bytes, record.tenant, record.bytes)
        if record.state == STORED:
            order = self._file_order.setdefault(record.tenant, OrderedIds())
            order.add(record.file_id, record.created_ms, record.purpose)

    def _drop_file(self, tenant: str, file_id: str) -> None:
        files = self._files.get(tenant, {})
        if (file := files.pop(file_id, None)) is not None:
            self._add(self._bytes, tenant, -file.bytes)
            self._file_order.get(tenant, OrderedIds()).drop(file_id)
        if not files:
            self._files.pop(tenant, None)

    def _set_store(self, store: Store, record: VectorStore | None) -> None:
        was_there, old_record = store.is_there, store.record
        store.record = record
        vector_store = record or old_record
        if vector_store is None or was_there is store.is_there:
            return
        order = self._store_order.setdefault(vector_store.tenant, OrderedIds())
        if store.is_there:
            order.add(vector_store.store_id, vector_store.created_ms)
        else:
            order.drop(vector_store.store_id)
        for file_id in list(store.files):
            self._update_pending((vector_store.tenant, vector_store.store_id, file_id))

    def _drop(self, names: list[str]) -> None:
        match names:
            case [tenant, name] if name in self._files.get(tenant, {}):
                self._drop_file(tenant, name)
            case [tenant, name, *rest] if name.startswith(batches.PREFIX):
                self.batches.drop(tenant, name, *rest)
            case [tenant, name, *rest] if name.startswith(conversations.PREFIX):
                self.conversations.drop(tenant, name, *rest)
            case [tenant, name, *rest] if store := self._stores.get(tenant, {}).get(name):
                match rest:
                    case []:
                        self._set_store(store, None)
                    case [child_id] if child_id == USED:
                        store.used_ms = 0
                    case [child_id]:
                        store.drop_file(child_id)
                        store.batches.pop(child_id, None)
                    case [child_id, _]:
                        store.drop_result(child_id)
                if store.is_empty():
                    del self._stores[tenant][name]

    # For endpoints

    def file(self, tenant: str, file_id: str) -> StoredFile | None:
        """Return a file whose upload is complete, or None."""
        file = self._files.get(tenant, {}).get(file_id)
        return file if file is not None and file.state == STORED else None

    def file_order(self, tenant: str) -> OrderedIds:
        """Return the ids of a tenant's files in order."""
        return self._file_order.get(tenant, OrderedIds())

    def batch_file(self, batch: Batch) -> StoredFile | None:
        """Return the input file of a batch; it stays until the batch ends, even if deleted."""
        file = self._files.get(batch.tenant, {}).get(batch.input_file_id)
        return file if file is not None and file.state in (STORED, DELETED) else None

    def store(self, tenant: str, store_id: str) -> VectorStore | None:
        """Return a store that its owner has not deleted, or None."""
        store = self._store(tenant, store_id)
        return store.record if store.is_there else None

    def store_order(self, tenant: str) -> OrderedIds:
        """Return the ids of a tenant's stores in order."""
        return self._store_order.get(tenant, OrderedIds())

    def used_ms(self, store: VectorStore) -> int:
        """Return when a store was last used, in wall-clock milliseconds."""
        return max(store.created_ms, self._store(store.tenant, store.store_id).used_ms)

    def expires_ms(self, store: VectorStore) -> int | None:
        """Return when a store expires, in wall-clock milliseconds; None if it never does."""
        days = store.expires_days
        return self.used_ms(store) + days * DAY_MS if days else None

    def contents(self, store: VectorStore) -> Store:
        """Return the files and batches of a store."""
        return self._store(store.tenant, store.store_id)

    def revision(self, store: VectorStore, file_id: str) -> int:
        """Return the revision of a file's desired state; 0 without one."""
        spec = self.contents(store).files.get(file_id)
        return spec.revision if spec is not None else 0

    def deletion_of(self, file: StoredFile) -> list[ObjectRecord]:
        """Return the records that delete a file, and remove it from all stores."""
        stores = self._stores.get(file.tenant, {}).values()
        entries = (store.entry(file.file_id) for store in stores if store.is_there)
        return [replace(file, state=DELETED), *(mark_deleted(entry) for entry in entries if entry)]

    # For the indexer and the sweeper

    def has_pending(self) -> bool:
        """Return whether any file of a store has not reached its desired state."""
        return any(self._pending.values())

    def pending_tenants(self, *, is_present: bool) -> Iterable[str]:
        """Return the tenants with files to add to stores if `is_present`, or else to remove."""
        return self._pending[is_present].keys()

    def next_pending(
        self, tenant: str, excluded_keys: Container[FileKey], *, is_present: bool
    ) -> FileKey | None:
        """Return the first pending file of a tenant, without the excluded ones."""
        waiting = self._pending[is_present].get(tenant, {})
        return next((place for place in waiting if place not in excluded_keys), None)

    def pending_entry(self, place: FileKey) -> tuple[VectorStore | None, StoreEntry] | None:
        """Return the store and the entry of a pending file, or None; without a store if that is
        deleted."""
        tenant, store_id, file_id = place
        if not any(place in pending.get(tenant, {}) for pending in self._pending.values()):
            return None
        store = self._store(tenant, store_id)
        entry = StoreEntry(store.files[file_id], store.results.get(file_id))
        return store.record if store.is_there else None, entry

    def deleted_stores(self) -> Iterator[VectorStore]:
        """Iterate over deleted stores that have no files left."""
        for store in self._all_stores():
            if store.record is not None and store.record.deleted and not store.files:
                yield store.record

    def keys_of(self, store: VectorStore) -> Iterable[str]:
        """Return all keys below that of a store, and then its own."""
        contents = self.contents(store)
        records: list[ObjectRecord] = [*contents.results.values(), *contents.files.values()]
        records += contents.batches.values()
        keys = [key_of(record) for record in records]
        return [*keys, object_key(store.tenant, store.store_id, USED), key_of(store)]

    def every_store(self) -> Iterator[VectorStore]:
        """Iterate over the stores of all tenants that are not deleted."""
        return (
            store.record
            for store in self._all_stores()
            if store.record and not store.record.deleted
        )

    def _all_stores(self) -> list[Store]:
        return [store for stores in self._stores.values() for store in stores.values()]

    def every_file(self) -> list[StoredFile]:
        """List the files of all tenants, in any state."""
        return [file for files in self._files.values() for file in files.values()]


def mark_deleted(entry: StoreEntry) -> StoreFile:
    """Return the record that removes a file from its store."""
    return replace(entry.spec, target_state=DELETED, revision=entry.spec.revision + 1)
