"""What callers keep, from the records of the log."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from schemas.records import (
    FileBatch,
    StoredFile,
    StoreFile,
    StoreFileResult,
    StoreUsed,
    VectorStore,
)
from schemas.rules.metadata import is_number
from streams.openai.objects.stores import StoreEntry
from streams.openai.objects.table import DAY_MS, FileKey, ObjectRecord, ObjectTable, key_of

STORE = VectorStore(store_id="vs_1", tenant="t", name="n", created_ms=5)


def file(name: str = "file-1", **fields: Any) -> StoredFile:
    defaults = {"tenant": "t", "filename": "a.txt", "purpose": "user_data", "bytes": 1}
    return StoredFile(file_id=name, **{**defaults, "created_ms": 1, "state": "stored", **fields})


def store_file(name: str = "file-1", **fields: Any) -> StoreFile:
    defaults = {"store_id": "vs_1", "tenant": "t", "target_state": "present", "revision": 1}
    return StoreFile(file_id=name, **{**defaults, "created_ms": 1, **fields})


def result(name: str = "file-1", **fields: Any) -> StoreFileResult:
    defaults = {"store_id": "vs_1", "tenant": "t", "revision": 1, "status": "completed", "at_ms": 1}
    return StoreFileResult(file_id=name, **{**defaults, **fields})


def table_of(*records: ObjectRecord) -> ObjectTable:
    table = ObjectTable()
    for record in records:
        table.apply(key_of(record), record)
    return table


def files_of(table: ObjectTable, tenant: str) -> list[str]:
    return list(table.file_order(tenant).beyond(None, newer=True))


def entries_of(table: ObjectTable, store: VectorStore = STORE) -> list[StoreEntry]:
    contents = table.contents(store)
    entries = (contents.entry(file_id) for file_id in contents.order.beyond(None, newer=True))
    return [entry for entry in entries if entry is not None]


def undone(table: ObjectTable) -> list[StoreEntry]:
    """All that something is to be done about."""
    places = list[FileKey]()
    for is_present in (True, False):
        for tenant in table.pending_tenants(is_present=is_present):
            while (place := table.next_pending(tenant, places, is_present=is_present)) is not None:
                places.append(place)
    assert bool(places) == table.has_pending()
    wishes = [table.pending_entry(place) for place in places]
    return [wish[1] for wish in wishes if wish is not None]


def test_object_table_separates_tenants() -> None:
    table = table_of(file(), file("file-2", tenant="u"), STORE)
    assert table.file("t", "file-1") == file()
    assert table.file("u", "file-1") is None and table.file("", "file-1") is None
    assert files_of(table, "u") == ["file-2"]
    assert table.store("t", "vs_1") == STORE and table.store("u", "vs_1") is None
    assert not table.store_order("u")


def test_object_table_ignores_record_under_foreign_key() -> None:
    """A forged key must not give a file to another tenant."""
    table = ObjectTable()
    table.apply("u/file-1", file())
    assert not len(table) and files_of(table, "t") == files_of(table, "u") == []


def test_object_table_hides_uploading_and_deleted_files() -> None:
    for state in ("uploading", "deleted"):
        table = table_of(file(state=state))
        assert table.file("t", "file-1") is None and files_of(table, "t") == []
        assert table.every_file() == [file(state=state)]


def test_object_table_matches_result_to_revision() -> None:
    """A result for an earlier revision must not report the changed file as ready."""
    table = table_of(STORE, store_file(revision=2), result(revision=1))
    entry = table.contents(STORE).entry("file-1")
    assert entry is not None and entry.status == "in_progress"
    assert [store_entry.spec.revision for store_entry in undone(table)] == [2]
    table.apply(key_of(result()), result(revision=2))
    assert not undone(table)
    for status in ("completed", "failed"):
        table = table_of(STORE, store_file(), result(status=status))
        assert [store_entry.status for store_entry in entries_of(table)] == [status]


def test_object_table_lists_files_that_need_work() -> None:
    cases: list[tuple[list[ObjectRecord], bool]] = [
        ([STORE, store_file()], True),
        ([STORE, store_file(), result(status="in_progress")], True),
        ([STORE, store_file(), result()], False),
        ([STORE, store_file(target_state="cancelled")], False),
        ([STORE, store_file(target_state="cancelled"), result(documents=2)], True),
        ([STORE, store_file(target_state="deleted"), result()], True),
        ([replace(STORE, deleted=True), store_file(), result()], True),
        ([store_file(), result(), replace(STORE, deleted=True)], True),
    ]
    for records, is_undone in cases:
        table = table_of(*records)
        assert bool(undone(table)) == is_undone, records


def test_object_table_accepts_records_in_any_order() -> None:
    """Compaction keeps the last record of each key at its place."""
    used = StoreUsed(store_id="vs_1", tenant="t", at_ms=9)
    batch = FileBatch(batch_id="vsfb_1", store_id="vs_1", tenant="t", created_ms=1)
    records: list[ObjectRecord] = [result(), store_file(batch_id="vsfb_1"), batch, used, STORE]
    for ordered in (records, list(reversed(records))):
        table = table_of(*ordered)
        assert table.used_ms(STORE) == 9 and table.contents(STORE).batches == {"vsfb_1": batch}
        counts = table.contents(STORE).counts
        assert counts("vsfb_1").total() == counts().total() == 1 and not counts("other")
        assert len(table) == 5
        for key in [*table.keys_of(STORE)]:
            table.apply(key, None)
        assert len(table) == 0 and not list(table.every_store()) and not undone(table)


def test_deleted_file_leaves_all_its_stores() -> None:
    second_store = replace(STORE, store_id="vs_2")
    table = table_of(
        STORE, second_store, file(), store_file(), store_file(store_id="vs_2", revision=4)
    )
    table.apply(key_of(STORE), STORE)
    for record in table.deletion_of(file()):
        table.apply(key_of(record), record)
    assert not (files_of(table, "t") or entries_of(table) or entries_of(table, second_store))
    assert sorted(store_entry.spec.revision for store_entry in undone(table)) == [2, 5]
    assert table.revision(STORE, "file-1") == 2


def test_vector_store_expires_days_after_last_use() -> None:
    store = replace(STORE, expires_days=2)
    assert table_of(STORE).expires_ms(STORE) is None
    assert table_of(store).expires_ms(store) == 5 + 2 * DAY_MS
    used = StoreUsed(store_id="vs_1", tenant="t", at_ms=99)
    assert table_of(store, used).expires_ms(store) == 99 + 2 * DAY_MS


def test_deleted_store_is_finished_when_its_files_are() -> None:
    deleted_store = replace(STORE, deleted=True)
    table = table_of(deleted_store, store_file())
    assert not list(table.deleted_stores()) and table.store("t", "vs_1") is None
    table.apply(key_of(store_file()), None)
    assert list(table.deleted_stores()) == [deleted_store]


NAMES = st.sampled_from(["file-1", "file-2", "file-3"])
ATTRIBUTES = st.sampled_from(["", '{"a": 1}', '{"a": 2, "b": "x"}', '{"b": true}'])
STATES = st.sampled_from(["present", "cancelled", "deleted"])
RECORDS = st.one_of(
    st.builds(
        store_file,
        NAMES,
        target_state=STATES,
        attributes=ATTRIBUTES,
        batch_id=st.sampled_from(["", "vsfb_1"]),
        revision=st.integers(1, 2),
        created_ms=st.integers(1, 3),
    ),
    st.builds(
        result,
        NAMES,
        revision=st.integers(1, 2),
        status=st.sampled_from(["in_progress", "completed", "failed"]),
        usage_bytes=st.integers(0, 9),
    ),
    st.builds(file, NAMES, state=st.sampled_from(["stored", "deleted"]), bytes=st.integers(0, 9)),
    st.just(STORE),
    st.just(replace(STORE, deleted=True)),
)


@given(st.lists(st.tuples(RECORDS, st.booleans()), max_size=20))
def test_object_table_sums_equal_those_of_all_records(records: list[tuple[Any, bool]]) -> None:
    """Sums follow each record, so that no call adds up all files of a store."""
    table, last = ObjectTable(), dict[str, Any]()
    for record, is_there in records:
        table.apply(key_of(record), record if is_there else None)
        last.pop(key_of(record), None)
        if is_there:
            last[key_of(record)] = record
    rebuilt_table = table_of(*last.values())
    entries = entries_of(rebuilt_table)
    store, stored_files = (
        table.contents(STORE),
        [last_record for last_record in last.values() if isinstance(last_record, StoredFile)],
    )
    for batch_id in ("", "vsfb_1"):
        listed = [
            store_entry for store_entry in entries if batch_id in ("", store_entry.spec.batch_id)
        ]
        assert +store.counts(batch_id) == Counter(store_entry.status for store_entry in listed)
    assert store.usage_bytes == sum(
        store_entry.result.usage_bytes for store_entry in entries if store_entry.result
    )
    numbers = dict[str, set[bool]]()
    for entry in entries:
        for key, value in json.loads(entry.spec.attributes or "{}").items():
            numbers.setdefault(key, set()).add(is_number(value))
    assert {key: {kind} for key, kind in store.kinds().items()} == {
        key: kinds if len(kinds) == 1 else {store.kinds()[key]} for key, kinds in numbers.items()
    }
    assert table.bytes_of("t") == sum(stored_file.bytes for stored_file in stored_files)
    assert table.objects_of("t") == sum(not isinstance(x, StoreFileResult) for x in last.values())
    names = sorted((x.created_ms, x.file_id) for x in stored_files if x.state == "stored")
    assert files_of(table, "t") == [name for _, name in names]
    assert {key_of(store_entry.spec) for store_entry in undone(table)} == {
        key_of(store_entry.spec) for store_entry in undone(rebuilt_table)
    }
    assert len(table) == len(last)
