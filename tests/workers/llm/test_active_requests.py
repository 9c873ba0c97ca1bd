"""The rules of a worker's side, by plain calls: no log, no clock."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import DeadlineExceeded, KvUnavailable
from schemas.records import (
    CancelWork,
    Outcome,
    OutcomeKind,
    PhaseKind,
    Role,
    Sampling,
    TokenLogprob,
    WireError,
    Work,
    WorkPhase,
)
from schemas.rules.tokens import pack_tokens
from tests.schemas.examples import TRACEPARENT
from tests.workers.fakes import EPOCH, WORKER, cancel_work, handle, out, work
from tests.workers.llm.worker_in_memory import DECODE, NOW_MS, PREFILL, WorkerInMemory


def test_work_starts_engine_job() -> None:
    worker = WorkerInMemory()
    worker.work("r1", PREFILL, attempt=2)
    (job,) = worker.engine.jobs
    assert (job.request_id, job.phase, list(job.prompt_tokens)) == ("r1.2", PREFILL, [1, 2, 3])
    assert len(worker.requests) == 1
    assert worker.requests.requests_total == 1


@pytest.mark.parametrize("changes", [{"worker_id": "w2"}, {"worker_epoch": EPOCH - 1}])
def test_worker_ignores_work_for_other_worker_or_epoch(changes: dict[str, Any]) -> None:
    worker = WorkerInMemory()
    worker.work(**changes)
    assert (worker.engine.jobs, worker.phases, len(worker.requests)) == ([], [], 0)


@pytest.mark.parametrize(
    ("changes", "kind", "code", "retriable"),
    [
        ({"model": "other"}, PhaseKind.FAILED, "model_not_found", False),
        ({"adapter": "eve"}, PhaseKind.FAILED, "model_not_found", False),
        ({"prompt_tokens": b"abc"}, PhaseKind.FAILED, "undecodable_record", False),
        ({"gateway_partition": 2}, PhaseKind.FAILED, "invalid_request", False),
        ({"phase": PREFILL}, PhaseKind.REFUSED, "worker_refused", True),
    ],
)
def test_worker_reports_work_that_cannot_run(
    changes: dict[str, Any], kind: PhaseKind, code: str, retriable: bool
) -> None:
    worker = WorkerInMemory(4, 64, Role.REPLICA)
    worker.work(**changes)
    (phase,) = worker.phases
    assert phase.error is not None
    assert (phase.kind, phase.error.code, phase.error.retriable) == (kind, code, retriable)
    assert (phase.worker_id, phase.worker_epoch, phase.router_id) == (WORKER, EPOCH, "router-a")
    assert (worker.engine.jobs, len(worker.requests)) == ([], 0)


def test_worker_refuses_work_beyond_limit() -> None:
    worker = WorkerInMemory(held_max=2)
    for name in ("r1", "r2", "r3"):
        worker.work(name)
    (phase,) = worker.phases
    assert (phase.request_id, phase.kind) == ("r3", PhaseKind.REFUSED)
    assert len(worker.requests) == 2


def test_draining_worker_refuses_work() -> None:
    worker = WorkerInMemory()
    worker.requests.draining = True
    worker.work()
    assert worker.phases[0].error is not None
    assert "draining" in worker.phases[0].error.message


def test_worker_ignores_repeated_work() -> None:
    worker = WorkerInMemory()
    worker.work()
    worker.work()
    assert len(worker.engine.jobs) == 1
    worker.step(out(ids=[5], text="a", finish_reason="stop"))
    worker.work()
    assert (len(worker.engine.jobs), worker.phases) == (1, [])


def test_higher_attempt_voids_lower_attempt() -> None:
    worker = WorkerInMemory()
    worker.work(attempt=1)
    worker.work(attempt=2)
    assert worker.engine.aborted == ["r1.1"]
    worker.step(out("r1.1", [5], "a"), out("r1.1", finish_reason="abort"), out("r1.2", [6], "b"))
    frame = worker.frame()
    assert (list(frame.attempts), list(frame.token_ids)) == ([2], [6])
    assert worker.phases == []
    worker.work(attempt=1)
    assert [job.request_id for job in worker.engine.jobs] == ["r1.1", "r1.2"]


@pytest.mark.parametrize("has_handle", [True, False])
def test_decode_reuses_kv_of_prefill_on_same_worker(has_handle: bool) -> None:
    worker = WorkerInMemory()
    worker.work("r1", PREFILL)
    worker.step(out(ids=[5], text="a", finish_reason="handover", kv=handle(NOW_MS + 99)))
    kv = handle(NOW_MS + 99, WORKER) if has_handle else None  # none: it would expire too soon
    worker.work("r1", DECODE, kv=kv, prefill_worker=WORKER, first_seq=1, first_char=1)
    first, second = worker.engine.jobs
    assert (first.request_id, second.request_id, second.kv) == ("r1.1", "r1.1", None)
    assert worker.engine.aborted == ["r1.1"]  # the KV is free for the cache, not kept for a peer


def test_worker_bounds_remembered_requests() -> None:
    worker = WorkerInMemory(seen_max=2)
    for name in ("r1", "r2", "r3"):
        worker.work(name)
        worker.step(out(f"{name}.1", [5], finish_reason="stop"))
    worker.work("r3")
    assert len(worker.engine.jobs) == 3
    worker.work("r1")  # forgotten
    assert len(worker.engine.jobs) == 4


def test_prefill_sends_token_and_hands_kv_over() -> None:
    worker = WorkerInMemory()
    worker.work("r1", PREFILL, gateway_partition=1)
    kv = handle(NOW_MS + 5_000)
    worker.step(out(ids=[5], text="ab", finish_reason="handover", kv=kv, cached_tokens=2))
    frame = worker.frame(1)
    assert (list(frame.token_ids), list(frame.texts), list(frame.ends)) == ([5], ["ab"], [])
    (phase,) = worker.phases
    assert (phase.kind, phase.sent_tokens, phase.sent_chars) == (PhaseKind.PREFILL_DONE, 1, 2)
    assert (phase.started_ms, phase.ended_ms) == (NOW_MS, NOW_MS + 10)
    assert (phase.prompt_tokens, phase.cached_tokens) == (3, 2)
    assert phase.kv is not None
    assert (phase.kv.worker_id, phase.kv.worker_epoch) == (WORKER, EPOCH)
    assert phase.kv.engine_id == kv.engine_id
    assert worker.headers == [[("traceparent", TRACEPARENT)]]
    assert worker.requests.kv_until_ms == NOW_MS + 5_000
    assert len(worker.requests) == 0


@pytest.mark.parametrize(
    ("text", "stop", "sent_text"),
    [
        ("hello", (), "hello"),
        ("hello", ("lo w",), "hel"),
        ("hello", ("x", "o!", "lo w"), "hel"),
        ("hello", ("hellos",), ""),
        ("hello", ("ell",), "hello"),  # an engine would have stopped; no prefix at the end
        ("hello\n", ("\n\n",), "hello"),
        ("aa", ("aab",), ""),
    ],
)
@pytest.mark.parametrize("logprobs", [[], [TokenLogprob(token_id=5, token="t", logprob=-1.0)]])
def test_prefill_withholds_possible_start_of_stop_string(
    text: str, stop: tuple[str, ...], sent_text: str, logprobs: list[TokenLogprob]
) -> None:
    worker = WorkerInMemory()
    worker.work("r1", PREFILL, sampling=Sampling(max_tokens=8, stop=stop))
    kv = handle(NOW_MS + 5_000)
    worker.step(out(ids=[5], text=text, finish_reason="handover", kv=kv, logprobs=logprobs))
    assert list(worker.frame().texts) == [sent_text]
    assert (worker.phases[0].sent_tokens, worker.phases[0].sent_chars) == (1, len(sent_text))


def test_prefill_of_whole_answer_sends_all_text() -> None:
    worker = WorkerInMemory()
    worker.work("r1", PREFILL, sampling=Sampling(max_tokens=1, stop=("lo w",)))
    worker.step(out(ids=[5], text="hello", finish_reason="length"))
    assert list(worker.frame().texts) == ["hello"]


def test_prefill_of_whole_answer_ends_request() -> None:
    worker = WorkerInMemory()
    worker.work("r1", PREFILL)
    worker.step(out(ids=[5], text="a", finish_reason="length"))
    end, outcome = worker.end()
    assert (end.kind, end.finish_reason, end.seq, end.chars) == (
        OutcomeKind.COMPLETED,
        "length",
        1,
        1,
    )
    assert (outcome.prefill_worker, outcome.decode_worker) == (WORKER, "")
    assert worker.phases == []


def test_replica_runs_whole_answer() -> None:
    worker = WorkerInMemory(4, 64, Role.REPLICA)
    worker.work(arrived_ms=NOW_MS - 7)
    worker.step(out(ids=[5], text="a", cached_tokens=2), now_ms=NOW_MS + 3)
    worker.step(out(ids=[6, 7], text=""), now_ms=NOW_MS + 4)
    worker.step(out(ids=[8], text="bc", finish_reason="stop", stop_reason="x"), now_ms=NOW_MS + 5)
    (batch,) = worker.frames.take(NOW_MS)
    frame = batch.frame
    assert list(frame.first_seqs) == [0]  # three steps, one frame, so one row
    assert list(frame.first_chars) == [0]
    assert list(frame.token_counts) == [4]
    assert list(frame.token_ids) == [5, 6, 7, 8]
    assert list(frame.texts) == ["abc"]
    (end,), ((outcome, _),) = frame.ends, batch.reports
    assert isinstance(outcome, Outcome)
    assert (end.seq, end.chars, end.stop_reason) == (4, 3, "x")
    assert (end.prefill_worker, end.decode_worker) == (WORKER, WORKER)
    assert (outcome.kind, outcome.completion_tokens) == (OutcomeKind.COMPLETED, 4)
    assert (outcome.arrived_ms, outcome.first_token_ms, outcome.ended_ms) == (
        NOW_MS - 7,
        NOW_MS + 3,
        NOW_MS + 5,
    )
    assert (outcome.cached_tokens, outcome.prompt_tokens, outcome.kv_bytes) == (2, 3, 0)


def test_answer_continues_after_tokens_of_earlier_attempts() -> None:
    """Rows count from the prior tokens, which the reported prompt length excludes."""
    worker = WorkerInMemory(4, 64, Role.REPLICA)
    worker.work(prompt_tokens=pack_tokens([1, 2, 3, 8, 9]), prior_tokens=2, prior_chars=5)
    assert worker.engine.jobs[0].prior_tokens == 2
    worker.step(out(ids=[5], text="a", cached_tokens=4))
    worker.step(out(ids=[6], text="bc", finish_reason="stop"))
    (batch,) = worker.frames.take(NOW_MS)
    frame = batch.frame
    assert (list(frame.first_seqs), list(frame.first_chars)) == ([2], [5])
    assert (list(frame.token_ids), list(frame.texts)) == ([5, 6], ["abc"])
    assert len(frame.starts) == 1
    (end,), ((outcome, _),) = frame.ends, batch.reports
    assert isinstance(outcome, Outcome)
    assert (end.seq, end.chars, end.prompt_tokens) == (4, 8, 3)
    assert (outcome.completion_tokens, outcome.prompt_tokens, outcome.cached_tokens) == (4, 3, 3)


@pytest.mark.parametrize("phase", [PREFILL, DECODE])
def test_finished_answer_ends_with_tokens_of_earlier_attempts(phase: WorkPhase) -> None:
    """An earlier attempt sampled the end and could not report it."""
    worker = WorkerInMemory()
    worker.work("r1", phase, prior_tokens=2, prior_chars=5)
    worker.step(out("r1.1", ids=[], text="", finish_reason="stop", stop_reason="9"))
    (batch,) = worker.frames.take(NOW_MS)
    (end,), ((outcome, _),) = batch.frame.ends, batch.reports
    assert isinstance(outcome, Outcome) and outcome.completion_tokens == 2
    assert (end.kind, end.seq, end.chars, end.stop_reason) == (OutcomeKind.COMPLETED, 2, 5, "9")
    assert not batch.frame.token_ids and not worker.phases


def test_hand_over_continues_after_tokens_of_earlier_attempts() -> None:
    """Prefill counts its token after the prior ones; decode resends that token only."""
    worker = WorkerInMemory()
    worker.work("r1", PREFILL, prior_tokens=2, prior_chars=5)
    worker.step(out(ids=[5], text="ab", finish_reason="handover", kv=handle(NOW_MS + 9_000)))
    assert list(worker.frame().first_seqs) == [2]
    assert (worker.phases[-1].sent_tokens, worker.phases[-1].sent_chars) == (3, 7)
    worker = WorkerInMemory()
    worker.take(remote(prior_tokens=2, prior_chars=5, first_seq=3, first_char=7))
    worker.step(out(ids=[5], text="ab"))
    assert not worker.frames.pending()
    worker.step(out(ids=[6], text="c"))
    assert (list(worker.frame().first_seqs)) == [2]


def remote(**changes: Any) -> Work:
    fields = {
        "kv": handle(NOW_MS + 9_000, "w0"),
        "prefill_worker": "w0",
        "first_token_ms": NOW_MS - 1,
        "first_seq": 1,
        "first_char": 2,
        "cached_tokens": 3,
    }
    return work("r1", DECODE, NOW_MS, **{**fields, **changes})


def test_decode_resends_first_token_and_reports_kv_once() -> None:
    """Decode continues from its own first token, so the gateway must receive that token."""
    worker = WorkerInMemory()
    worker.take(remote())
    assert worker.engine.jobs[0].kv is not None
    worker.step(out(ids=[5], text="ab", kv_bytes=640, transfer_ms=1.5))
    assert not worker.frames.pending()
    worker.step(out(ids=[6], text="c", kv_bytes=640))
    assert worker.frames.pending() and not worker.frames.urgent
    (phase,) = worker.phases
    assert (phase.kind, phase.kv_bytes, phase.transfer_ms) == (PhaseKind.KV_RECEIVED, 640, 1.5)
    worker.step(out(ids=[7], text="d", finish_reason="length"))
    (batch,) = worker.frames.take(NOW_MS)
    frame = batch.frame
    assert (list(frame.first_seqs), list(frame.first_chars)) == ([0], [0])
    assert (list(frame.token_ids), list(frame.texts)) == ([5, 6, 7], ["abcd"])
    outcome = batch.reports[0][0]
    assert isinstance(outcome, Outcome)
    assert (outcome.kv_bytes, outcome.cached_tokens) == (640, 3)
    assert (outcome.first_token_ms, outcome.completion_tokens) == (NOW_MS - 1, 3)
    assert (outcome.prefill_worker, outcome.decode_worker) == ("w0", WORKER)


def test_worker_reports_missed_kv_once() -> None:
    worker = WorkerInMemory()
    worker.take(remote())
    error = KvUnavailable("r1.1: KV not read").to_wire()
    worker.step(out(ids=[5], text="ab", kv_missed=error))
    worker.step(out(ids=[6], text="c"))
    (phase,) = worker.phases
    assert (phase.kind, phase.error) == (PhaseKind.KV_MISSED, error)


@pytest.mark.parametrize("at_once", [True, False])
def test_decode_resends_first_token_if_answer_ends_there(at_once: bool) -> None:
    """Prefill's token was not the end, so decode has sampled another one."""
    worker = WorkerInMemory()
    worker.take(remote())
    worker.step(out(ids=[2], finish_reason="stop" * at_once))
    if not at_once:
        assert not worker.frames.pending()
        worker.step(out(finish_reason="stop"))
    (batch,) = worker.frames.take(NOW_MS)
    assert (list(batch.frame.first_seqs), list(batch.frame.token_ids)) == ([0], [2])
    assert batch.frame.ends[0].seq == 1


def test_decode_sends_text_that_was_incomplete_at_prefill() -> None:
    worker = WorkerInMemory()
    worker.take(remote(first_seq=1, first_char=0))  # its character was incomplete at prefill
    worker.step(out(ids=[5], text=""))
    assert not worker.frames.pending()
    worker.step(out(ids=[6], text="é!"))
    frame = worker.frame()
    assert (list(frame.first_seqs), list(frame.first_chars)) == ([0], [0])
    assert list(frame.texts) == ["é!"]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=3), st.text("ab", max_size=3)), max_size=8
    ),
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_rows_join_to_whole_answer(
    steps: list[tuple[list[int], str]], first_seq: int, first_char: int
) -> None:
    worker = WorkerInMemory()
    worker.take(remote(first_seq=first_seq, first_char=first_char))
    for ids, text in steps:
        worker.step(out(ids=ids, text=text))
    worker.step(out(finish_reason="stop"))
    ids = [token for step in steps for token in step[0]]
    text = "".join(step[1] for step in steps)
    (batch,) = worker.frames.take(NOW_MS)
    frame = batch.frame
    assert list(frame.first_seqs) == list(frame.first_chars) == [0] * bool(ids or text)
    assert (list(frame.token_ids), list(frame.texts)) == (ids, [text] * bool(ids or text))
    assert (frame.ends[0].seq, frame.ends[0].chars) == (len(ids), len(text))


def test_decode_resends_logprobs_with_tokens() -> None:
    worker = WorkerInMemory()
    worker.take(remote())
    logprobs = [TokenLogprob(token_id=n, token="t", logprob=-1.0) for n in (5, 6)]
    worker.step(out(ids=[5], text="ab", logprobs=logprobs[:1]))
    assert not worker.frames.pending()
    worker.step(out(ids=[6], text="c", logprobs=logprobs[1:]))
    (entry,) = worker.frame().logprobs
    assert (entry.first_seq, list(entry.tokens)) == (0, logprobs)


def test_decode_ignores_expired_handle() -> None:
    worker = WorkerInMemory()
    worker.take(remote(kv=handle(NOW_MS, "w0")))
    assert worker.engine.jobs[0].kv is None
    worker.step(out(ids=[5, 6], text="abc", finish_reason="stop"))
    _, outcome = worker.end()
    assert (outcome.prefill_worker, outcome.decode_worker) == (WORKER, WORKER)


@pytest.mark.parametrize(
    "last",
    [
        {"finish_reason": "error", "error": KvUnavailable("gone").to_wire()},
        {"finish_reason": "error"},
        {"finish_reason": "abort"},
        {"finish_reason": "handover"},
    ],
)
def test_engine_failure_returns_request_as_retriable(last: dict[str, Any]) -> None:
    for phase_kind in (PREFILL, DECODE):
        worker = WorkerInMemory()
        worker.work("r1", phase_kind)
        worker.step(out(**last))
        (phase,) = worker.phases
        assert phase.kind is PhaseKind.FAILED
        assert phase.error is not None
        assert phase.error.retriable
        assert phase.error.code == ("kv_unavailable" if "error" in last else "engine_failed")
        assert len(worker.requests) == 0
        assert not worker.frames.pending()


def test_client_error_stays_final() -> None:
    worker = WorkerInMemory()
    worker.work()
    error = WireError(code="context_length_exceeded", message="too long")
    worker.step(out(finish_reason="error", error=error))
    assert worker.phases[0].error == error


def test_cancellation_ends_request_and_drops_later_outputs() -> None:
    worker = WorkerInMemory()
    worker.work()
    worker.step(out(ids=[5], text="a"))
    worker.frames.take(NOW_MS)
    worker.requests.cancel(cancel_work(), NOW_MS + 20)
    assert worker.engine.aborted == ["r1.1"]
    end, outcome = worker.end()
    assert (end.kind, end.seq, end.chars) == (OutcomeKind.CANCELLED, 0, 0)
    assert (outcome.kind, outcome.completion_tokens) == (OutcomeKind.CANCELLED, 1)
    worker.step(out(ids=[6], text="b"), out(finish_reason="abort"))
    assert (worker.frames.pending(), worker.phases) == (False, [])


@pytest.mark.parametrize(
    ("order", "aborted"),
    [
        (cancel_work("r9"), ["r9.1"]),  # it may hold KV that was handed over
        (cancel_work("r1", attempt=2), ["r1.2"]),
        (cancel_work("r1", worker_id="w2"), []),
    ],
)
def test_unrelated_cancellation_ends_no_request(order: CancelWork, aborted: list[str]) -> None:
    worker = WorkerInMemory()
    worker.work()
    worker.requests.cancel(order, NOW_MS)
    assert (len(worker.requests), worker.frames.pending()) == (1, False)
    assert worker.engine.aborted == aborted


def test_deadline_expires_due_request() -> None:
    worker = WorkerInMemory()
    worker.work("r1", deadline_ms=NOW_MS + 50)
    worker.work("r2", deadline_ms=NOW_MS + 90)
    assert worker.requests.next_deadline_ms == NOW_MS + 50
    worker.requests.expire(NOW_MS + 50)
    assert worker.engine.aborted == ["r1.1"]
    end, outcome = worker.end()
    assert (end.request_id, end.kind) == ("r1", OutcomeKind.EXPIRED)
    assert outcome.error is not None
    assert outcome.error.code == DeadlineExceeded.code
    assert worker.requests.next_deadline_ms == NOW_MS + 90
    worker.step(out("r2.1", [5], finish_reason="stop"))
    assert worker.requests.next_deadline_ms is None


def test_late_work_expires_without_running() -> None:
    worker = WorkerInMemory()
    worker.work(deadline_ms=NOW_MS)
    assert worker.engine.jobs == []
    assert worker.end()[1].kind is OutcomeKind.EXPIRED


def test_engine_deadline_error_expires_request() -> None:
    worker = WorkerInMemory()
    worker.work()
    worker.step(out(finish_reason="error", error=DeadlineExceeded("late").to_wire()))
    assert worker.end()[1].kind is OutcomeKind.EXPIRED
    assert worker.phases == []


def test_worker_prunes_deadlines_of_ended_requests() -> None:
    worker = WorkerInMemory()
    for number in range(2_000):
        worker.work(f"r{number}")
        worker.step(out(f"r{number}.1", finish_reason="stop"))
    assert len(worker.requests._deadlines) < 300


def test_give_back_reports_every_request() -> None:
    worker = WorkerInMemory()
    worker.work("r1", PREFILL)
    worker.work("r2")
    empty: list[bool] = []
    worker.requests.on_empty = lambda: empty.append(True)
    error = WireError(code="engine_dead", message="gone", retriable=True)
    worker.requests.give_back(error, NOW_MS)
    assert [(p.request_id, p.kind, p.error) for p in worker.phases] == [
        ("r1", PhaseKind.FAILED, error),
        ("r2", PhaseKind.FAILED, error),
    ]
    assert (len(worker.requests), empty, worker.engine.aborted) == (0, [True], ["r1.1", "r2.1"])


def test_abandon_aborts_requests_without_report() -> None:
    worker = WorkerInMemory()
    worker.work()
    worker.step(out(ids=[5], text="a"))
    worker.requests.abandon()
    assert (worker.phases, worker.frames.pending(), worker.engine.aborted) == ([], False, ["r1.1"])
