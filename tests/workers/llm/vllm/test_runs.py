"""Hangs told from queues, and outputs merged for a slow worker."""

import pytest

from schemas.records import WireError
from tests.workers.llm.engines import job
from workers.llm.engine import Output
from workers.llm.vllm.runs import ActiveRuns, Mailbox, VllmRun


def runs(
    count: int, *, running_max: int = 4, adapters: str = ""
) -> tuple[ActiveRuns, list[VllmRun]]:
    """Runs that all came at 0 s; 30 s to the first token, 10 s between. A letter is an adapter."""
    table = ActiveRuns(
        running_max=running_max, first_token_timeout_s=30, progress_timeout_s=10, adapters_max=1
    )
    jobs = [job([1], adapter=name) for name in adapters or [""] * count]
    new_runs = [VllmRun(job, max_tokens=8, hands_over=False, clock_s=0.0) for job in jobs]
    for run in new_runs:
        table.add(run, 0.0)
    return table, new_runs


def names(stalled: list[tuple[VllmRun, str]]) -> list[str]:
    return [run.job.request_id for run, _ in stalled]


def test_silent_engine_stalls_all_runs() -> None:
    table, all_runs = runs(3)
    assert table.stalled(9.9, reported_s=0.0, kv_usage=0.1) == []
    stalled = table.stalled(10.0, reported_s=0.0, kv_usage=0.1)
    assert names(stalled) == [run.job.request_id for run in all_runs]
    assert "silent for 10.0 s" in stalled[0][1]


def test_idle_engine_may_be_silent() -> None:
    table, _ = runs(0)
    assert table.stalled(99.0, reported_s=0.0, kv_usage=0.0) == []
    table.add(VllmRun(job([1]), max_tokens=8, hands_over=False, clock_s=99.0), 99.0)
    assert table.stalled(100.0, reported_s=0.0, kv_usage=0.0) == []


def test_begun_run_stalls_without_tokens() -> None:
    table, (first, _) = runs(2)
    table.begin(first, 1.0)
    table.token_s = 1.0
    assert table.stalled(10.9, reported_s=10.9, kv_usage=0.1) == []
    stalled = table.stalled(11.0, reported_s=11.0, kv_usage=0.1)
    assert names(stalled) == [first.job.request_id]
    table.token_s = 10.0  # of anybody
    assert table.stalled(11.0, reported_s=11.0, kv_usage=0.1) == []


def test_waiting_run_stalls_without_first_token_on_busy_engine() -> None:
    table, (first, second) = runs(2)
    table.begin(first, 5.0)
    table.token_s = 34.0
    assert table.stalled(34.9, reported_s=34.9, kv_usage=0.1) == []  # the clock began at 5 s
    assert names(table.stalled(35.0, reported_s=35.0, kv_usage=0.1)) == [second.job.request_id]


def test_later_run_does_not_reset_clock_of_earlier_run() -> None:
    table, (first, second) = runs(2)
    table.begin(second, 20.0)
    table.remove(second, 25.0)
    table.token_s = 25.0
    assert names(table.stalled(30.0, reported_s=30.0, kv_usage=0.1)) == [first.job.request_id]


@pytest.mark.parametrize(("running_max", "kv_usage"), [(1, 0.1), (4, 0.99)])
def test_full_engine_does_not_stall_queued_run(running_max: int, kv_usage: float) -> None:
    table, (first, _) = runs(2, running_max=running_max)
    table.begin(first, 1.0)
    for second in range(2, 200):
        table.token_s = float(second)
        assert table.stalled(float(second), reported_s=second, kv_usage=kv_usage) == []


def test_run_may_wait_for_other_adapters() -> None:
    table, (first, similar, waiting) = runs(3, adapters="aab")
    table.begin(first, 1.0)
    for second in range(2, 31):
        table.token_s = float(second)
        assert table.stalled(float(second), reported_s=second, kv_usage=0.1) == []
    table.token_s = 31.0
    stalled = table.stalled(31.0, reported_s=31.0, kv_usage=0.1)
    assert names(stalled) == [similar.job.request_id], "its adapter is in the batch"
    table.remove(first, 40.0)
    assert names(table.stalled(69.9, reported_s=69.9, kv_usage=0.1)) == []
    assert waiting.clock_s == 40.0


def test_run_table_distinguishes_runs_of_same_request() -> None:
    table, (first,) = runs(1)
    table.remove(first, 1.0)
    second_run = VllmRun(first.job, max_tokens=8, hands_over=False, clock_s=1.0)
    table.add(second_run, 1.0)
    assert table.holds(second_run)
    assert not table.holds(first)


def test_mailbox_merges_outputs() -> None:
    mail = Mailbox()
    mail.put(Output(request_id="a", token_ids=(1,), text="x", cached_tokens=4, kv_bytes=9))
    mail.put(Output(request_id="b", token_ids=(7,), text="y"))
    mail.put(Output(request_id="a", token_ids=(2, 3), text="z", cached_tokens=4))
    mail.put(Output(request_id="a", finish_reason="stop", stop_reason="z", cached_tokens=4))
    first, second = mail.take()
    assert (first.token_ids, first.text, first.kv_bytes) == ((1, 2, 3), "xz", 9)
    assert (first.finish_reason, first.stop_reason, first.cached_tokens) == ("stop", "z", 4)
    assert second.request_id == "b"
    assert len(mail) == 0


def test_mailbox_separates_outputs_of_repeated_request() -> None:
    mail = Mailbox()
    error = WireError(code="engine_failed", message="")
    mail.put(Output(request_id="a", finish_reason="error", error=error))
    mail.put(Output(request_id="a", token_ids=(1,)))
    mail.put(Output(request_id="a", token_ids=(2,), finish_reason="length"))
    (first,) = mail.take()
    assert (first.error, first.token_ids) == (error, ())
    (second,) = mail.take()
    assert (second.error, second.token_ids, second.finish_reason) == (None, (1, 2), "length")


def test_run_that_awaits_peer_does_not_stall() -> None:
    table, (first, second) = runs(2)
    second.awaited_ms = 500_000
    assert names(table.stalled(30.0, reported_s=30.0, kv_usage=0.1)) == [first.job.request_id]
    table.remove(first, 30.0)
    assert table.stalled(90.0, reported_s=90.0, kv_usage=0.1) == []
