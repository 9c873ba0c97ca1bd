"""Which batches are carried, of all that the table has."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.codec import Codec
from schemas.records import Batch, BatchProgress
from schemas.settings import LogSettings
from streams.openai.batches.batch_runner import BatchRunner
from streams.openai.batches.batch_runs import BatchRuns
from streams.openai.batches.turns import CARRIED_MAX, TURN_LINES
from streams.openai.objects.table import ObjectTable, key_of
from tests.streams.gateway.batch_samples import file_of, line
from tests.streams.openai.batches.test_turns import batch


def progress_of(of: Batch, sent_lines: int, **fields: Any) -> BatchProgress:
    return BatchProgress(
        batch_id=of.batch_id,
        tenant=of.tenant,
        status="in_progress",
        total=50_000,
        sent_lines=sent_lines,
        sent_bytes=10 * sent_lines,
        at_ms=1,
        **fields,
    )


def all_answered(of: Batch, sent_lines: int) -> BatchProgress:
    return progress_of(of, sent_lines, answered=b"\xff" * (sent_lines // 8))


def table_of(*records: Batch | BatchProgress) -> ObjectTable:
    table = ObjectTable()
    for record in records:
        table.apply(key_of(record), record)
    return table


def test_batch_runs_rotate_more_tenants_than_slots() -> None:
    """Without rotation the same tenants would keep all slots."""
    batches = [batch(f"t{number:02}", number) for number in range(20)]
    table, carried, had_a_turn = table_of(*batches), BatchRuns(), set[str]()
    assert len(batches) > CARRIED_MAX + 1
    for _ in range(3 * len(batches)):
        assert carried.refresh(table.batches, 0)
        run = next(iter(carried))
        had_a_turn.add(run.batch.tenant)
        run.mark_sent(progress_of(run.batch, run.committed.sent_lines + TURN_LINES), [])
        table.apply(key_of(run.committed), run.committed)
    assert had_a_turn == {record.tenant for record in batches}


def test_batch_runs_refresh_reads_only_needed_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of waiting batches must not be read on every refresh."""
    names = ("bob", "alice")
    waiting = [batch(name, number) for name in names for number in range(1_000)]
    table, carried, read = table_of(*waiting), BatchRuns(), list[Batch]()
    progress = table.batches.progress

    def noted_progress(of: Batch) -> BatchProgress | None:
        read.append(of)
        return progress(of)

    monkeypatch.setattr(table.batches, "progress", noted_progress)
    for _ in range(3):
        carried.refresh(table.batches, 0)
    assert len(read) == CARRIED_MAX and [len(carried.of_tenant(name)) for name in names] == [8, 8]


def test_batch_runs_wait_for_lines_sent_by_predecessor() -> None:
    bob, alice, carol = batch("bob", 0), batch("alice", 0), batch("carol", 0)
    table, carried = table_of(bob, alice, carol, progress_of(bob, 8)), BatchRuns()
    carried.remember(bob, progress_of(bob, 8), 0)
    carried.remember(alice, all_answered(alice, 8), 0)
    assert carried.tenants() == ["bob"], "nothing of alice's is waited for"
    (run,) = carried.of_tenant("bob")
    assert not carried.may_send(run, 1), "it has no place"
    assert carried.refresh(table.batches, 0) and carried.may_send(run, 1)
    end_progress = replace(run.committed, status="completed")
    table.apply(key_of(end_progress), end_progress)
    assert carried.refresh(table.batches, 0) and not carried.of_tenant("bob")


def test_file_writer_cannot_choose_partition_of_line() -> None:
    """Files in which every fourth line is large are spread over all partitions."""
    unused: Any = None
    text = file_of(line("c")).strip()
    carrier = BatchRunner(LogSettings(), Codec(), unused, is_first=lambda: True, check_model=id)
    prompts = [carrier._prompt(batch("bob", 0), number, text) for number in range(0, 400, 4)]
    counts = [sum(prompt.partition == partition for prompt in prompts) for partition in range(4)]
    assert min(counts) > 10
