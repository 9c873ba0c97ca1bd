"""What is kept of a batch while its answers come."""

import json
from dataclasses import replace

from schemas.records import Answer, Batch, BatchProgress
from streams.openai.batches.batch_run import WRITE_S, BatchRun, early_end_status
from streams.openai.objects.log import PART_BYTES


def batch(cancelled_ms: int = 0) -> Batch:
    return Batch(
        batch_id="batch_1",
        input_file_id="file-1",
        endpoint="/v1/completions",
        created_ms=1,
        expires_ms=100,
        cancelled_ms=cancelled_ms,
    )


def started_run(total: int = 9, sent_lines: int = 9) -> BatchRun:
    progress = BatchProgress(
        batch_id="batch_1",
        status="in_progress",
        total=total,
        sent_lines=sent_lines,
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
        completion_tokens=3,
        reasoning_tokens=1,
        error_code=error_code,
    )


def test_batch_run_ignores_second_answer_to_line() -> None:
    """An answer to a line that was not sent is ignored, too; a successor knows as much."""
    run = started_run(sent_lines=8)
    for line in (0, 7, 7, 8, 12):
        run.take_answer(line, str(line), answer(line))
    run.take_answer(7, "7", answer(7, error_code="cancelled"))
    run.take_answer(3, "3", answer(3, error_code="cancelled"))
    assert (run.done_lines, run.waiting) == (3, 5)
    assert run.output.pending.count(b"\n") == 2 and run.errors.pending.count(b"\n") == 1
    progress = run.progress((5,), 2)
    assert (progress.completed, progress.failed, progress.prompt_tokens) == (2, 1, 6)
    later = BatchRun(run.batch, progress, 0)
    assert [line for line in range(9) if later.is_answered(line)] == [0, 3, 7]
    later.take_answer(7, "7", answer(7))
    later.take_answer(1, "1", answer(1))
    assert later.done_lines == 4 and later.progress((6,), 3).completed == 3
    assert later.progress((6,), 3).reasoning_tokens == 4
    later.give_up(8, "8", "expired")
    assert later.done_lines == 5 and b"batch_expired" in later.errors.pending


def test_batch_run_counts_waiting_bytes_by_line() -> None:
    """A mean over all lines would hide large lines behind many small ones."""
    run = started_run(total=4, sent_lines=0)
    run.mark_sent(replace(run.committed, sent_lines=4, sent_bytes=1_030), [10, 10, 10, 1_000])
    assert run.waiting_bytes == 1_030
    for line in (0, 1, 1):
        run.take_answer(line, str(line), answer(line))
    assert run.waiting_bytes == 1_010
    later = BatchRun(run.batch, run.progress((), 1), 0)
    assert later.waiting_bytes == 2 * 1_030 / 4, "of another's lines the mean is known"


def test_batch_run_writes_results_when_part_is_full_or_old() -> None:
    """An old batch writes more seldom, so that its files have not too many parts."""
    run, hour_ms = started_run(), 3_600_001
    assert not run.is_due(1_000, 1)
    run.take_answer(0, "0", answer(0))
    assert not run.is_due(WRITE_S - 0.1, 1) and run.is_due(WRITE_S, 1)
    assert not run.is_due(35.9, hour_ms) and run.is_due(36, hour_ms)
    run.take_answer(1, "1", answer(1, body=json.dumps("x" * PART_BYTES)))
    assert run.is_due(0, 1)
    parts = run.output.parts()
    assert [len(part) for part in parts] == [PART_BYTES, run.pending_bytes - PART_BYTES]
    run.output.mark_written([5, 6])
    assert (run.output.offsets, run.pending_bytes) == ([5, 6], 0)
    assert run.output.size == sum(map(len, parts))


def test_early_end_status_follows_cancellation_or_deadline() -> None:
    assert early_end_status(batch(), 99) == ""
    assert early_end_status(batch(), 100) == "expired"
    assert early_end_status(batch(cancelled_ms=5), 100) == "cancelled"


def test_cancelled_batch_run_ends_cancelled_after_takeover() -> None:
    """A gateway that died between the last part and the end left a batch with all lines done."""
    run = BatchRun(batch(cancelled_ms=5), started_run().committed, 0)
    for line in range(5):
        run.take_answer(line, str(line), answer(line))
    for line in range(5, 9):
        run.give_up(line, str(line), "cancelled")
    later = BatchRun(run.batch, run.progress((5,), 2), 0)
    assert later.done_lines == 9 and later.end_status(2) == "cancelled"
    whole = started_run()
    for line in range(9):
        assert whole.end_status(1_000) == "expired"
        whole.take_answer(line, str(line), answer(line, error_code="failed" if line % 2 else None))
    assert whole.end_status(1_000) == "completed", "it was in time"
