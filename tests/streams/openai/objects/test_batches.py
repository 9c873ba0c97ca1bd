"""Batches in the table of what callers keep."""

from dataclasses import replace

import pytest

from schemas.records import Batch, BatchProgress
from streams.openai.objects.batches import line_key
from streams.openai.objects.table import ObjectTable, key_of

BATCH = Batch(
    batch_id="batch_1",
    tenant="t",
    input_file_id="file-1",
    endpoint="/v1/completions",
    created_ms=1,
    expires_ms=100,
)


def progress(status: str) -> BatchProgress:
    return BatchProgress(batch_id="batch_1", tenant="t", status=status, at_ms=1)


def apply_records(table: ObjectTable, *records: Batch | BatchProgress) -> None:
    for record in records:
        table.apply(key_of(record), record)


def test_batch_status_combines_batch_and_progress_records() -> None:
    table = ObjectTable()
    apply_records(table, BATCH)
    assert table.batches.status(BATCH) == "validating"
    apply_records(table, progress("in_progress"))
    assert table.batches.status(BATCH) == "in_progress"
    cancelled = replace(BATCH, cancelled_ms=5)
    apply_records(table, cancelled)
    assert table.batches.status(cancelled) == "cancelling"
    assert [*table.batches.open_batches("t")] == [cancelled] and table.batches.is_open(
        "t", "batch_1"
    )
    apply_records(table, progress("cancelled"))
    assert table.batches.status(cancelled) == "cancelled"
    assert not table.batches.open_tenants() and not [*table.batches.open_batches("t")]
    assert list(table.batches.order("t").beyond(None, newer=True)) == [cancelled.batch_id]
    assert table.batches.get("u", "batch_1") is None and len(table) == 2
    for key in (key_of(progress("")), key_of(BATCH)):
        table.apply(key, None)
    assert not table.batches.order("t") and len(table) == 0


@pytest.mark.parametrize(
    ("records", "is_given_up"),
    [
        ((), False),  # it is not read yet
        ((BATCH,), False),
        ((BATCH, progress("in_progress")), False),
        ((replace(BATCH, cancelled_ms=5),), True),
        ((replace(BATCH, expires_ms=10),), True),
        ((BATCH, progress("completed")), True),
    ],
)
def test_batch_lines_are_given_up_with_their_batch(
    records: tuple[Batch | BatchProgress, ...], is_given_up: bool
) -> None:
    """The bridge then sends no request for them."""
    table = ObjectTable()
    apply_records(table, *records)
    assert table.batches.is_given_up(line_key(BATCH, 7, "a/b"), 10) is is_given_up


def test_batch_table_lists_started_batches_first() -> None:
    table, started_batch = ObjectTable(), replace(BATCH, batch_id="batch_2", created_ms=9)
    apply_records(table, BATCH, started_batch, replace(progress("in_progress"), batch_id="batch_2"))
    assert [*table.batches.open_batches("t")] == [
        started_batch,
        BATCH,
    ] and table.batches.started_batches() == [started_batch]
    assert table.batches.open_tenants() == {"t"}
