"""What is kept of a batch while its answers come."""

import json
from dataclasses import replace

from schemas.records import Answer, Batch, BatchProgress
from streams.gateway.batches.batch_run import WRITE_S, BatchRun, early_end_status
from streams.gateway.log.objects import PART_BYTES


def batch(cancelled_ms: int = 0) -> Batch:
    return Batch(
        batch_id="batch_1",
        input_file_id="file-1",
        endpoint="/v1/completions",
        created_ms=1,
        expires_ms=100,
        cancelled_ms=cancelled_ms,
    )


def underway(total: int = 9, sent: int = 9) -> BatchRun:
    progress = BatchProgress(
        batch_id="batch_1",
        status="in_progress",
        total=total,
        sent_lines=sent,
        started_ms=1,
        at_ms=1,
    )
    return BatchRun(batch(), progress, now_s=0)


def answer(line: int, body: str = "{}", error_code: str | None = None) -> Answer:
    return Answer(
        prompt_topic="p",
        prompt_partition=0,
        prompt_offset=line,
        body=body,
        prompt_tokens=2,
        error_code=error_code,
    )


def test_a_second_answer_to_a_line_changes_nothing() -> None:
    """Nor does one to a line that was not asked; a successor knows as much."""
    each = underway(sent=8)
    for line in (0, 7, 7, 8, 12):
        each.take_answer(line, str(line), answer(line))
    each.take_answer(7, "7", answer(7, error_code="cancelled"))
    each.take_answer(3, "3", answer(3, error_code="cancelled"))
    assert (each.done_lines, each.waiting) == (3, 5)
    assert each.output.pending.count(b"\n") == 2 and each.errors.pending.count(b"\n") == 1
    progress = each.progress((5,), 2)
    assert (progress.completed, progress.failed, progress.prompt_tokens) == (2, 1, 6)
    later = BatchRun(each.batch, progress, 0)
    assert [line for line in range(9) if later.is_answered(line)] == [0, 3, 7]
    later.take_answer(7, "7", answer(7))
    later.take_answer(1, "1", answer(1))
    assert later.done_lines == 4 and later.progress((6,), 3).completed == 3
    later.give_up(8, "8", "expired")
    assert later.done_lines == 5 and b"batch_expired" in later.errors.pending


def test_bytes_that_wait_are_those_of_the_lines_that_wait() -> None:
    """The mean of all hides large lines behind many small ones (review of 28)."""
    each = underway(total=4, sent=0)
    each.mark_sent(replace(each.committed, sent_lines=4, sent_bytes=1_030), [10, 10, 10, 1_000])
    assert each.waiting_bytes == 1_030
    for line in (0, 1, 1):
        each.take_answer(line, str(line), answer(line))
    assert each.waiting_bytes == 1_010
    later = BatchRun(each.batch, each.progress((), 1), 0)
    assert later.waiting_bytes == 2 * 1_030 / 4, "of another's lines the mean is known"


def test_results_are_written_when_they_fill_a_part_or_wait_long() -> None:
    """An old batch writes more seldom, so that its files have not too many parts."""
    each, hour_ms = underway(), 3_600_001
    assert not each.is_due(1_000, 1)
    each.take_answer(0, "0", answer(0))
    assert not each.is_due(WRITE_S - 0.1, 1) and each.is_due(WRITE_S, 1)
    assert not each.is_due(35.9, hour_ms) and each.is_due(36, hour_ms)
    each.take_answer(1, "1", answer(1, body=json.dumps("x" * PART_BYTES)))
    assert each.is_due(0, 1)
    parts = each.output.parts()
    assert [len(part) for part in parts] == [PART_BYTES, each.pending_bytes - PART_BYTES]
    each.output.mark_written([5, 6])
    assert (each.output.offsets, each.pending_bytes) == ([5, 6], 0)
    assert each.output.size == sum(map(len, parts))


def test_a_batch_ends_as_its_caller_or_the_clock_says() -> None:
    assert early_end_status(batch(), 99) == ""
    assert early_end_status(batch(), 100) == "expired"
    assert early_end_status(batch(cancelled_ms=5), 100) == "cancelled"


def test_a_cancelled_batch_is_not_completed_whoever_gave_its_lines_up() -> None:
    """A gateway that died between the last part and the end left a batch in which every line was
    done."""
    each = BatchRun(batch(cancelled_ms=5), underway().committed, 0)
    for line in range(5):
        each.take_answer(line, str(line), answer(line))
    for line in range(5, 9):
        each.give_up(line, str(line), "cancelled")
    later = BatchRun(each.batch, each.progress((5,), 2), 0)
    assert later.done_lines == 9 and later.end_status(2) == "cancelled"
    whole = underway()
    for line in range(9):
        assert whole.end_status(1_000) == "expired"
        whole.take_answer(line, str(line), answer(line, error_code="failed" if line % 2 else None))
    assert whole.end_status(1_000) == "completed", "it was in time"
