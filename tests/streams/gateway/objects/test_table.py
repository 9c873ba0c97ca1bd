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
from streams.gateway.objects.stores import StoreEntry
from streams.gateway.objects.table import DAY_MS, FileKey, ObjectRecord, ObjectTable, key_of

STORE = VectorStore(store_id="vs_1", tenant="t", name="n", created_ms=5)


def file(name: str = "file-1", **fields: Any) -> StoredFile:
    known = {"tenant": "t", "filename": "a.txt", "purpose": "user_data", "bytes": 1}
    return StoredFile(file_id=name, **{**known, "created_ms": 1, "state": "stored", **fields})


def wanted(name: str = "file-1", **fields: Any) -> StoreFile:
    known = {"store_id": "vs_1", "tenant": "t", "wanted": "present", "revision": 1}
    return StoreFile(file_id=name, **{**known, "created_ms": 1, **fields})


def result(name: str = "file-1", **fields: Any) -> StoreFileResult:
    known = {"store_id": "vs_1", "tenant": "t", "revision": 1, "status": "completed", "at_ms": 1}
    return StoreFileResult(file_id=name, **{**known, **fields})


def table_of(*records: ObjectRecord) -> ObjectTable:
    found = ObjectTable()
    for record in records:
        found.apply(key_of(record), record)
    return found


def files_of(found: ObjectTable, tenant: str) -> list[str]:
    return list(found.file_order(tenant).beyond(None, newer=True))


def entries_of(found: ObjectTable, store: VectorStore = STORE) -> list[StoreEntry]:
    known = found.contents(store)
    entries = (known.entry(file_id) for file_id in known.order.beyond(None, newer=True))
    return [entry for entry in entries if entry is not None]


def undone(found: ObjectTable) -> list[StoreEntry]:
    """All that something is to be done about."""
    places = list[FileKey]()
    for is_present in (True, False):
        for tenant in found.pending_tenants(is_present=is_present):
            while (place := found.next_pending(tenant, places, is_present=is_present)) is not None:
                places.append(place)
    assert bool(places) == found.has_pending()
    wishes = [found.pending_entry(place) for place in places]
    return [wish[1] for wish in wishes if wish is not None]


def test_tenants_see_their_own_and_nobody_elses() -> None:
    found = table_of(file(), file("file-2", tenant="u"), STORE)
    assert found.file("t", "file-1") == file()
    assert found.file("u", "file-1") is None and found.file("", "file-1") is None
    assert files_of(found, "u") == ["file-2"]
    assert found.store("t", "vs_1") == STORE and found.store("u", "vs_1") is None
    assert not found.store_order("u")


def test_a_record_under_another_key_is_none() -> None:
    """Nobody gives another tenant a file by a forged key."""
    found = ObjectTable()
    found.apply("u/file-1", file())
    assert not len(found) and files_of(found, "t") == files_of(found, "u") == []


def test_half_an_upload_and_a_deleted_file_are_not_there() -> None:
    for state in ("uploading", "deleted"):
        found = table_of(file(state=state))
        assert found.file("t", "file-1") is None and files_of(found, "t") == []
        assert found.every_file() == [file(state=state)]


def test_a_result_counts_for_the_revision_that_it_answers() -> None:
    """Who changes a file meanwhile is not told that its former state is ready."""
    found = table_of(STORE, wanted(revision=2), result(revision=1))
    entry = found.contents(STORE).entry("file-1")
    assert entry is not None and entry.status == "in_progress"
    assert [each.spec.revision for each in undone(found)] == [2]
    found.apply(key_of(result()), result(revision=2))
    assert not undone(found)
    for status in ("completed", "failed"):
        found = table_of(STORE, wanted(), result(status=status))
        assert [each.status for each in entries_of(found)] == [status]


def test_what_is_done_about_a_file_follows_from_what_is_wanted() -> None:
    cases: list[tuple[list[ObjectRecord], bool]] = [
        ([STORE, wanted()], True),
        ([STORE, wanted(), result(status="in_progress")], True),
        ([STORE, wanted(), result()], False),
        ([STORE, wanted(wanted="cancelled")], False),
        ([STORE, wanted(wanted="cancelled"), result(documents=2)], True),
        ([STORE, wanted(wanted="deleted"), result()], True),
        ([replace(STORE, deleted=True), wanted(), result()], True),
        ([wanted(), result(), replace(STORE, deleted=True)], True),
    ]
    for records, is_undone in cases:
        found = table_of(*records)
        assert bool(undone(found)) == is_undone, records


def test_records_may_come_in_any_order_and_go() -> None:
    """Compaction keeps the last record of each key where it is."""
    used = StoreUsed(store_id="vs_1", tenant="t", at_ms=9)
    batch = FileBatch(batch_id="vsfb_1", store_id="vs_1", tenant="t", created_ms=1)
    records: list[ObjectRecord] = [result(), wanted(batch_id="vsfb_1"), batch, used, STORE]
    for ordered in (records, list(reversed(records))):
        found = table_of(*ordered)
        assert found.used_ms(STORE) == 9 and found.contents(STORE).batches == {"vsfb_1": batch}
        counts = found.contents(STORE).counts
        assert counts("vsfb_1").total() == counts().total() == 1 and not counts("other")
        assert len(found) == 5
        for key in [*found.keys_of(STORE)]:
            found.apply(key, None)
        assert len(found) == 0 and not list(found.every_store()) and not undone(found)


def test_a_file_that_is_deleted_goes_from_all_its_stores() -> None:
    other = replace(STORE, store_id="vs_2")
    found = table_of(STORE, other, file(), wanted(), wanted(store_id="vs_2", revision=4))
    found.apply(key_of(STORE), STORE)
    for record in found.deletion_of(file()):
        found.apply(key_of(record), record)
    assert not (files_of(found, "t") or entries_of(found) or entries_of(found, other))
    assert sorted(each.spec.revision for each in undone(found)) == [2, 5]
    assert found.revision(STORE, "file-1") == 2


def test_a_store_expires_days_after_its_last_use() -> None:
    store = replace(STORE, expires_days=2)
    assert table_of(STORE).expires_ms(STORE) is None
    assert table_of(store).expires_ms(store) == 5 + 2 * DAY_MS
    used = StoreUsed(store_id="vs_1", tenant="t", at_ms=99)
    assert table_of(store, used).expires_ms(store) == 99 + 2 * DAY_MS


def test_a_deleted_store_is_done_with_when_its_files_are() -> None:
    gone = replace(STORE, deleted=True)
    found = table_of(gone, wanted())
    assert not list(found.deleted_stores()) and found.store("t", "vs_1") is None
    found.apply(key_of(wanted()), None)
    assert list(found.deleted_stores()) == [gone]


NAMES = st.sampled_from(["file-1", "file-2", "file-3"])
ATTRIBUTES = st.sampled_from(["", '{"a": 1}', '{"a": 2, "b": "x"}', '{"b": true}'])
STATES = st.sampled_from(["present", "cancelled", "deleted"])
RECORDS = st.one_of(
    st.builds(
        wanted,
        NAMES,
        wanted=STATES,
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
def test_sums_are_those_of_all_files(records: list[tuple[Any, bool]]) -> None:
    """No call sums up all files of a store (found 28): sums follow each record."""
    found, last = ObjectTable(), dict[str, Any]()
    for record, is_there in records:
        found.apply(key_of(record), record if is_there else None)
        last.pop(key_of(record), None)
        if is_there:
            last[key_of(record)] = record
    anew = table_of(*last.values())
    entries = entries_of(anew)
    store, held = (
        found.contents(STORE),
        [each for each in last.values() if isinstance(each, StoredFile)],
    )
    for batch_id in ("", "vsfb_1"):
        listed = [each for each in entries if batch_id in ("", each.spec.batch_id)]
        assert +store.counts(batch_id) == Counter(each.status for each in listed)
    assert store.usage_bytes == sum(each.result.usage_bytes for each in entries if each.result)
    numbers = dict[str, set[bool]]()
    for entry in entries:
        for key, value in json.loads(entry.spec.attributes or "{}").items():
            numbers.setdefault(key, set()).add(is_number(value))
    assert {key: {kind} for key, kind in store.kinds().items()} == {
        key: kinds if len(kinds) == 1 else {store.kinds()[key]} for key, kinds in numbers.items()
    }
    assert found.bytes_of("t") == sum(each.bytes for each in held)
    assert found.objects_of("t") == sum(not isinstance(x, StoreFileResult) for x in last.values())
    names = sorted((x.created_ms, x.file_id) for x in held if x.state == "stored")
    assert files_of(found, "t") == [name for _, name in names]
    assert {key_of(each.spec) for each in undone(found)} == {
        key_of(each.spec) for each in undone(anew)
    }
    assert len(found) == len(last)
