"""What callers keep, from the records of the log."""

from dataclasses import replace
from typing import Any

from schemas.records import (
    FileBatch,
    StoredFile,
    StoreFile,
    StoreFileResult,
    StoreUsed,
    VectorStore,
)
from streams.gateway.objects.table import DAY_MS, Kept, Table, key_of

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


def table_of(*records: Kept) -> Table:
    found = Table()
    for record in records:
        found.apply(key_of(record), record)
    return found


def test_tenants_see_their_own_and_nobody_elses() -> None:
    found = table_of(file(), file("file-2", tenant="u"), STORE)
    assert found.file("t", "file-1") == file()
    assert found.file("u", "file-1") is None and found.file("", "file-1") is None
    assert [each.file_id for each in found.files("u")] == ["file-2"]
    assert found.store("t", "vs_1") == STORE and found.store("u", "vs_1") is None
    assert found.stores("u") == []


def test_a_record_under_another_key_is_none() -> None:
    """Nobody gives another tenant a file by a forged key."""
    found = Table()
    found.apply("u/file-1", file())
    assert not len(found) and found.files("t") == found.files("u") == []


def test_half_an_upload_and_a_deleted_file_are_not_there() -> None:
    for state in ("uploading", "deleted"):
        found = table_of(file(state=state))
        assert found.file("t", "file-1") is None and found.files("t") == []
        assert found.every_file() == [file(state=state)]


def test_a_result_counts_for_the_revision_that_it_answers() -> None:
    """Who changes a file meanwhile is not told that its former state is ready."""
    found = table_of(STORE, wanted(revision=2), result(revision=1))
    entry = found.entry(STORE, "file-1")
    assert entry is not None and entry.status == "in_progress"
    assert [each.wanted.revision for _, each in found.undone()] == [2]
    found.apply(key_of(result()), result(revision=2))
    assert not list(found.undone())
    for status in ("completed", "failed"):
        found = table_of(STORE, wanted(), result(status=status))
        assert [each.status for each in found.entries(STORE)] == [status]


def test_what_is_done_about_a_file_follows_from_what_is_wanted() -> None:
    cases: list[tuple[list[Kept], bool]] = [
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
        assert bool(list(found.undone())) == is_undone, records


def test_records_may_come_in_any_order_and_go() -> None:
    """Compaction keeps the last record of each key where it is."""
    used = StoreUsed(store_id="vs_1", tenant="t", at_ms=9)
    batch = FileBatch(batch_id="vsfb_1", store_id="vs_1", tenant="t", created_ms=1)
    records: list[Kept] = [result(), wanted(batch_id="vsfb_1"), batch, used, STORE]
    for ordered in (records, list(reversed(records))):
        found = table_of(*ordered)
        assert found.used_ms(STORE) == 9 and found.batch(STORE, "vsfb_1") == batch
        assert len(found.entries(STORE, "vsfb_1")) == 1 and not found.entries(STORE, "other")
        assert len(found) == 5
        for key in [*found.keys_of(STORE)]:
            found.apply(key, None)
        assert len(found) == 0 and found.every_store() == [] and not list(found.undone())


def test_a_file_that_is_deleted_goes_from_all_its_stores() -> None:
    other = replace(STORE, store_id="vs_2")
    found = table_of(STORE, other, file(), wanted(), wanted(store_id="vs_2", revision=4))
    found.apply(key_of(STORE), STORE)
    for record in found.without_file(file()):
        found.apply(key_of(record), record)
    assert not (found.files("t") or found.entries(STORE) or found.entries(other))
    assert sorted(each.wanted.revision for _, each in found.undone()) == [2, 5]
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
