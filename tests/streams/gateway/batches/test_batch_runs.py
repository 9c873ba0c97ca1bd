"""Which batches are carried, of all that the table has."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.codec import Codec
from schemas.records import Batch, BatchProgress
from schemas.settings import LogSettings
from streams.gateway.batches.batch_runner import BatchRunner
from streams.gateway.batches.batch_runs import BatchRuns
from streams.gateway.batches.turns import CARRIED_MAX, TURN_LINES
from streams.gateway.objects.table import ObjectTable, key_of
from tests.streams.gateway.batches.samples import file_of, line
from tests.streams.gateway.batches.test_turns import batch


def begun(of: Batch, sent: int, **more: Any) -> BatchProgress:
    return BatchProgress(
        batch_id=of.batch_id,
        tenant=of.tenant,
        status="in_progress",
        total=50_000,
        sent_lines=sent,
        sent_bytes=10 * sent,
        at_ms=1,
        **more,
    )


def all_answered(of: Batch, sent: int) -> BatchProgress:
    return begun(of, sent, answered=b"\xff" * (sent // 8))


def table_of(*records: Batch | BatchProgress) -> ObjectTable:
    table = ObjectTable()
    for record in records:
        table.apply(key_of(record), record)
    return table


def test_of_more_tenants_than_places_each_gets_one() -> None:
    """The same seventeen had their turns, since what is begun was first (review of 28)."""
    batches = [batch(f"t{number:02}", number) for number in range(20)]
    table, carried, had_a_turn = table_of(*batches), BatchRuns(), set[str]()
    assert len(batches) > CARRIED_MAX + 1
    for _ in range(3 * len(batches)):
        assert carried.refresh(table.batches, 0)
        each = next(iter(carried))
        had_a_turn.add(each.batch.tenant)
        each.mark_sent(begun(each.batch, each.committed.sent_lines + TURN_LINES), [])
        table.apply(key_of(each.committed), each.committed)
    assert had_a_turn == {each.tenant for each in batches}


def test_a_look_reads_no_more_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 000 that wait cost a second each time (review of 28)."""
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


def test_lines_that_a_predecessor_has_sent_are_waited_for() -> None:
    bob, alice, carol = batch("bob", 0), batch("alice", 0), batch("carol", 0)
    table, carried = table_of(bob, alice, carol, begun(bob, 8)), BatchRuns()
    carried.remember(bob, begun(bob, 8), 0)
    carried.remember(alice, all_answered(alice, 8), 0)
    assert carried.tenants() == ["bob"], "nothing of alice's is waited for"
    (each,) = carried.of_tenant("bob")
    assert not carried.may_send(each, 1), "it has no place"
    assert carried.refresh(table.batches, 0) and carried.may_send(each, 1)
    ended = replace(each.committed, status="completed")
    table.apply(key_of(ended), ended)
    assert carried.refresh(table.batches, 0) and not carried.of_tenant("bob")


def test_who_writes_a_file_does_not_choose_the_partition_of_a_line() -> None:
    """Every fourth line of some files is a large one (review of 28)."""
    unused: Any = None
    text = file_of(line("c")).strip()
    carrier = BatchRunner(LogSettings(), Codec(), unused, is_first=lambda: True, check_model=id)
    asked = [carrier._prompt(batch("bob", 0), number, text) for number in range(0, 400, 4)]
    counts = [sum(each.partition == partition for each in asked) for partition in range(4)]
    assert min(counts) > 10
