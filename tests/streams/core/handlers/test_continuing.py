"""What is placed again goes on where its answer stopped."""

from dataclasses import fields, replace
from typing import Any

import pytest

from schemas.errors import PriorRefused
from schemas.records import (
    Continued,
    DecisionKind,
    Orchestration,
    Outcome,
    OutcomeKind,
    PhaseKind,
    Reason,
    Role,
    Sampling,
    StreamEnd,
    Structured,
    StructuredKind,
    WorkPhase,
)
from schemas.rules.tokens import pack_tokens, token_count
from streams.core.effects import Decide, Dispatch, RequestProgress
from streams.core.events import ContinuedArrived, DecisionLoaded, Tick
from streams.core.handlers.endings import CONTINUE_WAIT_MS
from streams.core.states import State
from tests.streams.builders import T0, continued, passage, probing, request, retrieval
from tests.streams.core.router_harness import PARTITION, RouterHarness
from tests.streams.core.router_setups import pairs, replicas, split, state_of, work_of
from tests.streams.gateway.samples import stream_end

SAID = (901, 902, 903)
SAMPLING = request().sampling


def lost_while_decoding(count: int = 2, **settings: Any) -> RouterHarness:
    """A request whose replica is lost, with another one there; nobody has said anything yet."""
    on = replicas(count, says_at_once=False, **settings)
    on.request("r1")
    lose(on)
    return on


def lose(on: RouterHarness) -> None:
    on.worker(on.works[-1].worker_id, Role.REPLICA, window=4)


def test_next_attempt_continues_behind_tokens_that_readers_have() -> None:
    on = lost_while_decoding()
    assert state_of(on, "r1") is State.CONTINUING and len(on.works) == 1
    on.report_progress("r1", 1, *SAID, chars=11)
    first, work = on.works
    assert (work.attempt, work.prior_tokens, work.prior_chars) == (2, 3, 11)
    assert work.prompt_tokens == first.prompt_tokens + pack_tokens(SAID)
    assert (work.first_seq, work.first_char) == (3, 11)
    assert work.sampling == first.sampling
    assert on.decisions[-1].kind is DecisionKind.REPLACE
    assert on.decisions[-1].reason is Reason.WORKER_LOST


def test_void_decision_precedes_progress_request() -> None:
    """It can be in the log first: readers are asked only of an attempt that is void."""
    on = replicas(2, says_at_once=False)
    on.request("r1")
    effects = on.phase(on.works[-1], PhaseKind.FAILED)
    kinds = [type(effect) for effect in effects]
    assert kinds.index(Decide) < kinds.index(RequestProgress)
    assert not any(isinstance(effect, Dispatch) and effect.record.attempt > 1 for effect in effects)


def test_both_sides_of_handover_continue_behind_reported_tokens() -> None:
    on = split(prefills=1, decodes=2, says_at_once=False)
    on.request("r1")
    on.phase(on.works[-1], PhaseKind.PREFILL_DONE)
    on.phase(on.works[-1], PhaseKind.FAILED)
    on.report_progress("r1", 1, *SAID, chars=9)
    prefill = work_of(on, WorkPhase.PREFILL)
    assert (prefill.attempt, prefill.prior_tokens, prefill.first_seq) == (2, 3, 3)
    on.phase(prefill, PhaseKind.PREFILL_DONE, sent_tokens=4, sent_chars=12)
    decode = work_of(on, WorkPhase.DECODE)
    assert decode.prompt_tokens == prefill.prompt_tokens
    assert (decode.prior_tokens, decode.prior_chars, decode.first_seq, decode.first_char) == (
        3,
        9,
        4,
        12,
    )


def test_continued_request_with_one_token_left_gets_no_pair() -> None:
    """Prefill samples it and writes no KV: decode would wait for KV until the deadline."""
    on = pairs(Orchestration.CONCURRENT, says_at_once=False)
    on.request("r1", sampling=replace(SAMPLING, max_tokens=4))
    assert on.works[-1].orchestration is Orchestration.CONCURRENT
    on.phase(work_of(on, WorkPhase.DECODE), PhaseKind.FAILED)
    on.report_progress("r1", 1, *SAID)
    prefill = work_of(on, WorkPhase.PREFILL)
    assert (prefill.attempt, prefill.prior_tokens) == (2, 3)
    assert prefill.orchestration is Orchestration.PREFILL_FIRST


def test_third_attempt_continues_behind_all_reported_tokens() -> None:
    on = lost_while_decoding(3)
    plain = on.works[0].prompt_tokens
    on.report_progress("r1", 1, *SAID)
    lose(on)
    assert on.rebuilt().view() == on.router.view(), "nobody has said yet how much there is"
    on.report_progress("r1", 2, *SAID, 904, 905)
    assert on.works[-1].prompt_tokens == plain + pack_tokens([*SAID, 904, 905])
    assert (on.works[-1].attempt, on.works[-1].prior_tokens) == (3, 5)


def test_request_restarts_when_no_reader_reports_in_time() -> None:
    """The log says so and not a timer: a report written before that counts."""
    on = lost_while_decoding()
    for passed_ms in (CONTINUE_WAIT_MS - 1, 1):
        assert not on.on_the_way
        on.now_ms += passed_ms
        on.apply(Tick())
    (record,) = on.on_the_way
    session_id, written_by = on.accepted["r1"].session_id, on.router.router_id
    assert record == Continued(
        request_id="r1",
        session_id=session_id,
        attempt=1,
        written_by=written_by,
        at_ms=on.now_ms,
    )
    assert state_of(on, "r1") is State.CONTINUING
    on.read()
    assert (on.works[-1].attempt, on.works[-1].prior_tokens) == (2, 0)
    on.report_progress("r1", 1, *SAID)  # too late
    assert len(on.works) == 2
    lose(on)
    on.report_progress("r1", 2, *SAID)
    assert on.works[-1].prior_tokens == 3


def test_answer_restarts_when_its_form_refuses_prior_tokens() -> None:
    """Nobody is asked again: readers would report the same tokens."""
    on = lost_while_decoding(4)
    on.report_progress("r1", 1, *SAID)
    refused = PriorRefused("refused").to_wire()
    effects = on.phase(on.works[-1], PhaseKind.FAILED, error=refused)
    marks = [effect for effect in effects if isinstance(effect, RequestProgress)]
    assert [(mark.void.attempt, mark.void.asks) for mark in marks] == [(2, False)]
    assert state_of(on, "r1") is State.CONTINUING
    assert on.rebuilt().view() == on.router.view()
    on.read()
    assert (on.works[-1].attempt, on.works[-1].prior_tokens) == (3, 0)
    assert on.works[-1].prompt_tokens == on.works[0].prompt_tokens
    lose(on)
    on.report_progress("r1", 3, *SAID)
    assert on.works[-1].prior_tokens == 3, "only that attempt was refused"


def test_router_ignores_progress_of_other_attempts_and_repeats() -> None:
    on = lost_while_decoding()
    on.report_progress("r1", 2, 1, 2)
    on.report_progress("r9", 1, 1, 2)
    assert state_of(on, "r1") is State.CONTINUING
    on.report_progress("r1", 1, *SAID)
    on.report_progress("r1", 1, 5, 6, 7, 8)
    assert len(on.works) == 2 and on.works[-1].prior_tokens == 3


@pytest.mark.parametrize("tokens", [b"\0\0\0", pack_tokens(range(16)), b""])
def test_request_restarts_when_reported_tokens_are_unusable(tokens: bytes) -> None:
    on = lost_while_decoding()
    on.record(ContinuedArrived(continued("r1", 1, tokens=tokens), PARTITION))
    assert (on.works[-1].attempt, on.works[-1].prior_tokens) == (2, 0)


FORM = Structured(kind=StructuredKind.JSON_OBJECT, value="")


@pytest.mark.parametrize(
    "sampling",
    [
        replace(SAMPLING, structured=FORM),
        replace(SAMPLING, stop=("END",)),
        replace(SAMPLING, bad_words=("no",)),
        replace(SAMPLING, presence_penalty=0.5),
        replace(SAMPLING, frequency_penalty=-0.5),
    ],
    ids=["form", "stop strings", "forbidden words", "presence", "frequency"],
)
def test_request_continues_whatever_its_sampling(sampling: Sampling) -> None:
    """Engines rebuild the state of a form, of penalties and of stop strings from the tokens."""
    on = replicas(2, says_at_once=False)
    on.request("r1", sampling=sampling)
    lose(on)
    on.report_progress("r1", 1, *SAID)
    assert (on.works[-1].attempt, on.works[-1].prior_tokens) == (2, 3)


@pytest.mark.parametrize("continues", [True, False])
def test_probing_request_restarts_once_readers_report_progress(continues: bool) -> None:
    """Inserts before tokens that were read are put in again, so progress is awaited."""
    on = replicas(2, says_at_once=False, continues=continues)
    on.request("r1", retrieval=retrieval(probing=probing()))
    on.retrieved("r1")
    first = on.works[-1]
    lose(on)
    assert on.voids and on.works[-1] is first
    on.probed(first, 1, passage(3))
    on.report_progress("r1", 1, *SAID)
    work = on.works[-1]
    assert (work.attempt, work.prior_tokens, work.prompt_tokens) == (2, 0, first.prompt_tokens)
    assert work.probes is not None and len(work.probes.inserts) == 1


def test_continued_prompt_has_passages_and_reported_tokens() -> None:
    on = replicas(2, says_at_once=False)
    on.request("r1", retrieval=retrieval())
    on.retrieved("r1")
    lose(on)
    on.report_progress("r1", 1, *SAID)
    first, work = on.works
    assert work.prompt_tokens == first.prompt_tokens + pack_tokens(SAID)


def test_router_asks_no_readers_when_continuing_is_off() -> None:
    on = replicas(2, says_at_once=False, continues=False)
    on.request("r1")
    lose(on)
    assert not on.voids and on.works[-1].attempt == 2


def test_takeover_repeats_progress_request_or_work() -> None:
    on = lost_while_decoding()
    assert on.rebuilt().view() == on.router.view()
    on.taken_over()
    assert [void.attempt for void in on.voids] == [1, 1]
    on.report_progress("r1", 1, *SAID, chars=4)
    assert on.rebuilt().view() == on.router.view()
    before = on.works[-1]
    on.taken_over()  # which sends the same again
    assert on.works[-1] == replace(before, dispatched_ms=on.works[-1].dispatched_ms)


def test_outcome_of_void_attempt_ends_continuing_request() -> None:
    """Its gateway takes it for the end as well."""
    on = lost_while_decoding()
    on.outcome(on.works[0])
    assert on.outcomes["r1"].kind is OutcomeKind.COMPLETED
    on.report_progress("r1", 1, *SAID)
    assert len(on.works) == 1


@pytest.mark.parametrize("takes_over", [False, True])
@pytest.mark.parametrize("stage", ["waits", "placed"])
def test_reported_end_ends_request_whatever_was_placed_since(stage: str, takes_over: bool) -> None:
    """Such an end was delivered, while the next attempt ran on and was in the usage."""
    on = lost_while_decoding()
    if stage == "placed":
        on.report_progress("r1", 1, *SAID, chars=9)
        assert on.works[-1].attempt == 2
    end = replace(
        stream_end("r1", ["a", "b", "c", "d"], attempt=1, finish_reason="length"),
        kv_bytes=64, probes=2, retrieved_tokens=5, stalled_ms=3.5, worker_ms=70.0,
        first_token_ms=T0 + 7,
    )  # fmt: skip
    progress = continued("r1", 1, end=end)
    if takes_over:
        on.log.append(ContinuedArrived(progress, PARTITION))
        on.taken_over()
    else:
        on.record(ContinuedArrived(progress, PARTITION))
    outcome, usage = on.outcomes["r1"], on.used["r1"]
    assert (outcome.kind, outcome.completion_tokens) == (OutcomeKind.COMPLETED, 4)
    assert outcome.attempt > 1 + (stage == "placed"), "above what a worker may still end"
    shared_names = {attribute.name for attribute in fields(StreamEnd)} & {
        attribute.name for attribute in fields(Outcome)
    }
    for name in shared_names - {"attempt"}:
        assert getattr(outcome, name) == getattr(end, name), name
    assert (usage.completion_tokens, usage.prompt_tokens) == (4, 7 + 5)
    assert (usage.worker_ms, outcome.first_token_ms) == (70.0, T0 + 7), "of who made the answer"
    assert not on.router.view() and not on.work_in_flight()
    assert on.rebuilt().view() == {}


def test_reported_end_frees_credit_for_next_request() -> None:
    on = replicas(1, window=1, says_at_once=False)
    on.request("r1")
    on.phase(on.works[-1], PhaseKind.FAILED)
    on.report_progress("r1", 1, *SAID, chars=9)
    on.request("r2")
    assert (on.works[-1].request_id, on.works[-1].attempt) == ("r1", 2)
    on.now_ms += 5
    on.record(
        ContinuedArrived(continued("r1", 1, end=stream_end("r1", ["a"], attempt=1)), PARTITION)
    )
    assert (on.works[-1].request_id, on.works[-1].dispatched_ms) == ("r2", on.now_ms)


@pytest.mark.parametrize("kind", [OutcomeKind.FAILED, OutcomeKind.CANCELLED])
def test_reported_end_of_unfinished_answer_is_the_outcome(kind: OutcomeKind) -> None:
    on = lost_while_decoding()
    end = replace(stream_end("r1", ["a"], attempt=1), kind=kind)
    on.record(ContinuedArrived(continued("r1", 1, end=end), PARTITION))
    assert on.outcomes["r1"].kind is kind and not on.router.view()


@pytest.mark.parametrize("attempt", [1, 2])
def test_router_ignores_reported_end_of_standing_or_later_attempt(attempt: int) -> None:
    on = replicas()
    on.request("r1")
    end = stream_end("r1", ["a"], attempt=attempt)
    on.record(ContinuedArrived(continued("r1", attempt, end=end), PARTITION))
    assert state_of(on, "r1") is State.DECODING and on.rebuilt().view() == on.router.view()


@pytest.mark.parametrize("changes", [{}, {"sampling": replace(SAMPLING, stop=("x",))}])
def test_router_marks_every_void_attempt(changes: dict[str, Any]) -> None:
    """This includes attempts that restart and one that the last router may have begun."""
    on = replicas(2, says_at_once=False)
    on.request("r1", **changes)
    lose(on)
    assert [void.attempt for void in on.marks] == [1]
    second = replicas(1)
    second.request("r1", **changes)
    second.log = [event for event in second.log if not isinstance(event, DecisionLoaded)]
    second.attempts.clear()
    second.workers["x0"].holds.clear()
    second.says_at_once = False
    second.taken_over()
    assert [(void.attempt, void.asks) for void in second.marks] == [(1, False)]
    assert second.works[-1].attempt == 2


def test_continuing_request_can_be_cancelled_and_expire() -> None:
    on = lost_while_decoding()
    on.cancel("r1")
    assert on.outcomes["r1"].kind is OutcomeKind.CANCELLED
    on.request("r2", deadline_ms=on.now_ms + 600)
    lose(on)
    on.pass_ms(750)
    on.apply(Tick())
    assert on.outcomes["r2"].kind is OutcomeKind.EXPIRED


def test_prompt_tokens_exclude_reported_tokens_of_answer() -> None:
    on = lost_while_decoding(1)
    on.report_progress("r1", 1, *SAID)
    on.worker("x0", Role.REPLICA, window=0)  # lost again, and nobody is there
    on.report_progress("r1", 2, *SAID)
    on.pass_ms(61_000)
    assert on.outcomes["r1"].prompt_tokens == token_count(on.accepted["r1"].prompt_tokens)
    assert on.used["r1"].prompt_tokens == on.outcomes["r1"].prompt_tokens


def test_request_with_two_passed_deadlines_ends_once() -> None:
    """A router that ended it twice in the same tick would fail."""
    on = lost_while_decoding()
    on.now_ms = on.accepted["r1"].deadline_ms + 60_000
    on.apply(Tick())
    assert on.outcomes["r1"].kind is OutcomeKind.EXPIRED
