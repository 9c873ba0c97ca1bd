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
)
from tests.schemas.examples import TRACEPARENT
from tests.workers.fakes import EPOCH, WORKER, cancel_work, handle, out, work
from tests.workers.llm.held_in_memory import DECODE, NOW_MS, PREFILL, Desk


def test_work_becomes_a_job() -> None:
    desk = Desk()
    desk.work("r1", PREFILL, attempt=2)
    (job,) = desk.engine.jobs
    assert (job.request_id, job.phase, list(job.prompt_tokens)) == ("r1.2", PREFILL, [1, 2, 3])
    assert len(desk.held) == 1
    assert desk.held.requests_total == 1


@pytest.mark.parametrize("changes", [{"worker_id": "w2"}, {"worker_epoch": EPOCH - 1}])
def test_work_for_another_life_is_ignored(changes: dict[str, Any]) -> None:
    desk = Desk()
    desk.work(**changes)
    assert (desk.engine.jobs, desk.phases, len(desk.held)) == ([], [], 0)


@pytest.mark.parametrize(
    ("changes", "kind", "code", "retriable"),
    [
        ({"model": "other"}, PhaseKind.FAILED, "model_not_found", False),
        ({"prompt_tokens": b"abc"}, PhaseKind.FAILED, "undecodable_record", False),
        ({"gateway_partition": 2}, PhaseKind.FAILED, "invalid_request", False),
        ({"phase": PREFILL}, PhaseKind.REFUSED, "worker_refused", True),
    ],
)
def test_work_that_cannot_be_run_is_reported(
    changes: dict[str, Any], kind: PhaseKind, code: str, retriable: bool
) -> None:
    desk = Desk(4, 64, Role.REPLICA)
    desk.work(**changes)
    (phase,) = desk.phases
    assert phase.error is not None
    assert (phase.kind, phase.error.code, phase.error.retriable) == (kind, code, retriable)
    assert (phase.worker_id, phase.worker_epoch, phase.router_id) == (WORKER, EPOCH, "router-a")
    assert (desk.engine.jobs, len(desk.held)) == ([], 0)


def test_more_than_the_bound_is_refused() -> None:
    desk = Desk(held_max=2)
    for name in ("r1", "r2", "r3"):
        desk.work(name)
    (phase,) = desk.phases
    assert (phase.request_id, phase.kind) == ("r3", PhaseKind.REFUSED)
    assert len(desk.held) == 2


def test_a_draining_worker_refuses() -> None:
    desk = Desk()
    desk.held.draining = True
    desk.work()
    assert desk.phases[0].error is not None
    assert "draining" in desk.phases[0].error.message


def test_repeated_work_is_ignored_also_after_the_end() -> None:
    desk = Desk()
    desk.work()
    desk.work()
    assert len(desk.engine.jobs) == 1
    desk.step(out(ids=[5], text="a", finish_reason="stop"))
    desk.work()
    assert (len(desk.engine.jobs), desk.phases) == (1, [])


def test_a_higher_attempt_voids_a_lower_one() -> None:
    desk = Desk()
    desk.work(attempt=1)
    desk.work(attempt=2)
    assert desk.engine.aborted == ["r1.1"]
    desk.step(out("r1.1", [5], "a"), out("r1.1", finish_reason="abort"), out("r1.2", [6], "b"))
    frame = desk.frame()
    assert (list(frame.attempts), list(frame.token_ids)) == ([2], [6])
    assert desk.phases == []
    desk.work(attempt=1)
    assert [job.request_id for job in desk.engine.jobs] == ["r1.1", "r1.2"]


def test_decode_follows_prefill_of_the_same_attempt_on_one_worker() -> None:
    desk = Desk()
    desk.work("r1", PREFILL)
    desk.step(out(ids=[5], text="a", finish_reason="handover", kv=handle(NOW_MS + 99)))
    desk.work("r1", DECODE, kv=handle(NOW_MS + 99, WORKER), first_seq=1, first_char=1)
    first, second = desk.engine.jobs
    assert (first.request_id, second.request_id, second.kv) == ("r1.1", "r1.1", None)
    assert desk.engine.aborted == ["r1.1"]  # the KV is free for the cache, not kept for a peer


def test_what_is_remembered_is_bounded() -> None:
    desk = Desk(seen_max=2)
    for name in ("r1", "r2", "r3"):
        desk.work(name)
        desk.step(out(f"{name}.1", [5], finish_reason="stop"))
    desk.work("r3")
    assert len(desk.engine.jobs) == 3
    desk.work("r1")  # forgotten
    assert len(desk.engine.jobs) == 4


def test_prefill_sends_its_token_and_hands_the_kv_over() -> None:
    desk = Desk()
    desk.work("r1", PREFILL, gateway_partition=1)
    kv = handle(NOW_MS + 5_000)
    desk.step(out(ids=[5], text="ab", finish_reason="handover", kv=kv, cached_tokens=2))
    frame = desk.frame(1)
    assert (list(frame.token_ids), list(frame.texts), list(frame.ends)) == ([5], ["ab"], [])
    (phase,) = desk.phases
    assert (phase.kind, phase.sent_tokens, phase.sent_chars) == (PhaseKind.PREFILL_DONE, 1, 2)
    assert (phase.started_ms, phase.ended_ms) == (NOW_MS, NOW_MS + 10)
    assert (phase.prompt_tokens, phase.cached_tokens) == (3, 2)
    assert phase.kv is not None
    assert (phase.kv.worker_id, phase.kv.worker_epoch) == (WORKER, EPOCH)
    assert phase.kv.engine_id == kv.engine_id
    assert desk.headers == [[("traceparent", TRACEPARENT)]]
    assert desk.held.kv_until_ms == NOW_MS + 5_000
    assert len(desk.held) == 0


@pytest.mark.parametrize(
    ("text", "stop", "sent"),
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
def test_prefill_holds_back_what_may_begin_a_stop_string(
    text: str, stop: tuple[str, ...], sent: str, logprobs: list[TokenLogprob]
) -> None:
    desk = Desk()
    desk.work("r1", PREFILL, sampling=Sampling(max_tokens=8, stop=stop))
    kv = handle(NOW_MS + 5_000)
    desk.step(out(ids=[5], text=text, finish_reason="handover", kv=kv, logprobs=logprobs))
    assert list(desk.frame().texts) == [sent]
    assert (desk.phases[0].sent_tokens, desk.phases[0].sent_chars) == (1, len(sent))


def test_prefill_that_finishes_the_answer_sends_all_of_it() -> None:
    desk = Desk()
    desk.work("r1", PREFILL, sampling=Sampling(max_tokens=1, stop=("lo w",)))
    desk.step(out(ids=[5], text="hello", finish_reason="length"))
    assert list(desk.frame().texts) == ["hello"]


def test_prefill_that_finishes_the_answer_ends_the_request() -> None:
    desk = Desk()
    desk.work("r1", PREFILL)
    desk.step(out(ids=[5], text="a", finish_reason="length"))
    end, outcome = desk.end()
    assert (end.kind, end.finish_reason, end.seq, end.chars) == (
        OutcomeKind.COMPLETED,
        "length",
        1,
        1,
    )
    assert (outcome.prefill_worker, outcome.decode_worker) == (WORKER, "")
    assert desk.phases == []


def test_a_replica_runs_the_whole_answer() -> None:
    desk = Desk(4, 64, Role.REPLICA)
    desk.work(arrived_ms=NOW_MS - 7)
    desk.step(out(ids=[5], text="a", cached_tokens=2), now_ms=NOW_MS + 3)
    desk.step(out(ids=[6, 7], text=""), now_ms=NOW_MS + 4)
    desk.step(out(ids=[8], text="bc", finish_reason="stop", stop_reason="x"), now_ms=NOW_MS + 5)
    (batch,) = desk.frames.take(NOW_MS)
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


def test_decode_repeats_what_prefill_sent_with_its_next_token_and_reports_the_kv_once() -> None:
    """It goes on behind its own first token, so the gateway has to see that (issue 10, 8)."""
    desk = Desk()
    desk.take(remote())
    assert desk.engine.jobs[0].kv is not None
    desk.step(out(ids=[5], text="ab", kv_bytes=640, transfer_ms=1.5))
    assert not desk.frames.pending()
    desk.step(out(ids=[6], text="c", kv_bytes=640))
    assert desk.frames.pending() and not desk.frames.urgent
    (phase,) = desk.phases
    assert (phase.kind, phase.kv_bytes, phase.transfer_ms) == (PhaseKind.KV_RECEIVED, 640, 1.5)
    desk.step(out(ids=[7], text="d", finish_reason="length"))
    (batch,) = desk.frames.take(NOW_MS)
    frame = batch.frame
    assert (list(frame.first_seqs), list(frame.first_chars)) == ([0], [0])
    assert (list(frame.token_ids), list(frame.texts)) == ([5, 6, 7], ["abcd"])
    outcome = batch.reports[0][0]
    assert isinstance(outcome, Outcome)
    assert (outcome.kv_bytes, outcome.cached_tokens) == (640, 3)
    assert (outcome.first_token_ms, outcome.completion_tokens) == (NOW_MS - 1, 3)
    assert (outcome.prefill_worker, outcome.decode_worker) == ("w0", WORKER)


@pytest.mark.parametrize("at_once", [True, False])
def test_an_end_at_a_token_that_prefill_sent_otherwise_is_said_too(at_once: bool) -> None:
    """Prefill's was not the end, so decode's is another one (issue 10, 8)."""
    desk = Desk()
    desk.take(remote())
    desk.step(out(ids=[2], finish_reason="stop" * at_once))
    if not at_once:
        assert not desk.frames.pending()
        desk.step(out(finish_reason="stop"))
    (batch,) = desk.frames.take(NOW_MS)
    assert (list(batch.frame.first_seqs), list(batch.frame.token_ids)) == ([0], [2])
    assert batch.frame.ends[0].seq == 1


def test_text_of_a_token_that_was_sent_without_it_still_goes_out() -> None:
    desk = Desk()
    desk.take(remote(first_seq=1, first_char=0))  # its character was incomplete at prefill
    desk.step(out(ids=[5], text=""))
    assert not desk.frames.pending()
    desk.step(out(ids=[6], text="é!"))
    frame = desk.frame()
    assert (list(frame.first_seqs), list(frame.first_chars)) == ([0], [0])
    assert list(frame.texts) == ["é!"]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=3), st.text("ab", max_size=3)), max_size=8
    ),
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_rows_join_to_the_answer_from_its_start(
    steps: list[tuple[list[int], str]], first_seq: int, first_char: int
) -> None:
    desk = Desk()
    desk.take(remote(first_seq=first_seq, first_char=first_char))
    for ids, text in steps:
        desk.step(out(ids=ids, text=text))
    desk.step(out(finish_reason="stop"))
    ids = [token for step in steps for token in step[0]]
    text = "".join(step[1] for step in steps)
    (batch,) = desk.frames.take(NOW_MS)
    frame = batch.frame
    assert list(frame.first_seqs) == list(frame.first_chars) == [0] * bool(ids or text)
    assert (list(frame.token_ids), list(frame.texts)) == (ids, [text] * bool(ids or text))
    assert (frame.ends[0].seq, frame.ends[0].chars) == (len(ids), len(text))


def test_logprobs_are_repeated_with_their_tokens() -> None:
    desk = Desk()
    desk.take(remote())
    logprobs = [TokenLogprob(token_id=n, token="t", logprob=-1.0) for n in (5, 6)]
    desk.step(out(ids=[5], text="ab", logprobs=logprobs[:1]))
    assert not desk.frames.pending()
    desk.step(out(ids=[6], text="c", logprobs=logprobs[1:]))
    (found,) = desk.frame().logprobs
    assert (found.first_seq, list(found.tokens)) == (0, logprobs)


def test_a_late_handle_is_not_read() -> None:
    desk = Desk()
    desk.take(remote(kv=handle(NOW_MS, "w0")))
    assert desk.engine.jobs[0].kv is None
    desk.step(out(ids=[5, 6], text="abc", finish_reason="stop"))
    _, outcome = desk.end()
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
def test_an_end_without_an_answer_gives_the_request_back(last: dict[str, Any]) -> None:
    for phase_kind in (PREFILL, DECODE):
        desk = Desk()
        desk.work("r1", phase_kind)
        desk.step(out(**last))
        (phase,) = desk.phases
        assert phase.kind is PhaseKind.FAILED
        assert phase.error is not None
        assert phase.error.retriable
        assert phase.error.code == ("kv_unavailable" if "error" in last else "engine_failed")
        assert len(desk.held) == 0
        assert not desk.frames.pending()


def test_a_clients_error_stays_final() -> None:
    desk = Desk()
    desk.work()
    error = WireError(code="context_length_exceeded", message="too long")
    desk.step(out(finish_reason="error", error=error))
    assert desk.phases[0].error == error


def test_cancelled_work_ends_at_once_and_what_follows_is_dropped() -> None:
    desk = Desk()
    desk.work()
    desk.step(out(ids=[5], text="a"))
    desk.frames.take(NOW_MS)
    desk.held.cancel(cancel_work(), NOW_MS + 20)
    assert desk.engine.aborted == ["r1.1"]
    end, outcome = desk.end()
    assert (end.kind, end.seq, end.chars) == (OutcomeKind.CANCELLED, 0, 0)
    assert (outcome.kind, outcome.completion_tokens) == (OutcomeKind.CANCELLED, 1)
    desk.step(out(ids=[6], text="b"), out(finish_reason="abort"))
    assert (desk.frames.pending(), desk.phases) == (False, [])


@pytest.mark.parametrize(
    ("order", "aborted"),
    [
        (cancel_work("r9"), ["r9.1"]),  # it may hold KV that was handed over
        (cancel_work("r1", attempt=2), ["r1.2"]),
        (cancel_work("r1", worker_id="w2"), []),
    ],
)
def test_other_cancellations_end_nothing(order: CancelWork, aborted: list[str]) -> None:
    desk = Desk()
    desk.work()
    desk.held.cancel(order, NOW_MS)
    assert (len(desk.held), desk.frames.pending()) == (1, False)
    assert desk.engine.aborted == aborted


def test_deadlines_end_what_is_due() -> None:
    desk = Desk()
    desk.work("r1", deadline_ms=NOW_MS + 50)
    desk.work("r2", deadline_ms=NOW_MS + 90)
    assert desk.held.next_deadline_ms == NOW_MS + 50
    desk.held.expire(NOW_MS + 50)
    assert desk.engine.aborted == ["r1.1"]
    end, outcome = desk.end()
    assert (end.request_id, end.kind) == ("r1", OutcomeKind.EXPIRED)
    assert outcome.error is not None
    assert outcome.error.code == DeadlineExceeded.code
    assert desk.held.next_deadline_ms == NOW_MS + 90
    desk.step(out("r2.1", [5], finish_reason="stop"))
    assert desk.held.next_deadline_ms is None


def test_late_work_expires_without_running() -> None:
    desk = Desk()
    desk.work(deadline_ms=NOW_MS)
    assert desk.engine.jobs == []
    assert desk.end()[1].kind is OutcomeKind.EXPIRED


def test_an_engine_that_sees_the_deadline_first_expires_the_request() -> None:
    desk = Desk()
    desk.work()
    desk.step(out(finish_reason="error", error=DeadlineExceeded("late").to_wire()))
    assert desk.end()[1].kind is OutcomeKind.EXPIRED
    assert desk.phases == []


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    desk = Desk()
    for number in range(2_000):
        desk.work(f"r{number}")
        desk.step(out(f"r{number}.1", finish_reason="stop"))
    assert len(desk.held._deadlines) < 300


def test_giving_back_reports_every_request() -> None:
    desk = Desk()
    desk.work("r1", PREFILL)
    desk.work("r2")
    empty: list[bool] = []
    desk.held.on_empty = lambda: empty.append(True)
    error = WireError(code="engine_dead", message="gone", retriable=True)
    desk.held.give_back(error, NOW_MS)
    assert [(p.request_id, p.kind, p.error) for p in desk.phases] == [
        ("r1", PhaseKind.FAILED, error),
        ("r2", PhaseKind.FAILED, error),
    ]
    assert (len(desk.held), empty, desk.engine.aborted) == (0, [True], ["r1.1", "r2.1"])


def test_abandoning_says_nothing() -> None:
    desk = Desk()
    desk.work()
    desk.step(out(ids=[5], text="a"))
    desk.held.abandon()
    assert (desk.phases, desk.frames.pending(), desk.engine.aborted) == ([], False, ["r1.1"])
