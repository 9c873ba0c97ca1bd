"""Records of what a router decided: every field from the request, its attempt and its placement."""

from dataclasses import replace

import pytest

from schemas.errors import WorkerLost
from schemas.records import (
    Candidate,
    Decision,
    DecisionKind,
    Estimate,
    Mode,
    Orchestration,
    Outcome,
    OutcomeKind,
    Reason,
    Role,
    Session,
    Unmet,
)
from streams.core.handlers.orders import decision, outcome_of
from streams.core.requests.live import (
    LiveRequest,
    Placement,
    PriorAnswer,
    UnmetWishes,
    new_live_request,
)
from tests.streams import builders
from tests.streams.builders import ROUTER, T0


def placed() -> LiveRequest:
    """The second attempt of a request of ten tokens, which goes on behind three of its answer."""
    live = new_live_request(builders.request("r1", 13, deadline_ms=T0 + 9_000), 0)
    live.attempt.number, live.prior, live.queued_ms = 2, PriorAnswer(3), T0 + 100
    live.attempt.mode, live.attempt.orchestration = Mode.REMOTE, Orchestration.CONCURRENT
    live.attempt.prefill, live.attempt.decode = ("p0", 3), ("d0", 4)
    live.attempt.sent_tokens, live.attempt.cached_tokens, live.attempt.first_token_ms = (
        5,
        4,
        T0 + 200,
    )
    return live


def test_decision_record_has_request_attempt_and_placement() -> None:
    session = Session(
        session_id="s-r1", decode_worker="d0", worker_epoch=4, context_tokens=77, turns=1,
        last_used_ms=T0,
    )  # fmt: skip
    looked_at = (
        Candidate(worker_id="d0", role=Role.DECODE, credits=1, running=2, work_ahead_tokens=3),
    )
    estimate = Estimate(score=7.0)
    placement = Placement(
        policy="p", mode=Mode.REMOTE, reason=Reason.LEARNED, w_ttft=0.5, w_tpot=0.25, load=1.5,
        estimate=estimate, unmet_wishes=UnmetWishes(policy="a", orchestration="b",
        unmet=Unmet.NO_WORKER), policy_reason=Reason.EXPLORING,
    )  # fmt: skip
    record = decision(
        ROUTER, placed(), DecisionKind.REPLACE, Reason.WORKER_LOST, "static", T0 + 150,
        queue_length=6, session=session, placement=placement, looked_at=looked_at,
    )  # fmt: skip
    whole = Decision(
        request_id="r1",
        session_id="s-r1",
        attempt=2,
        router_id=ROUTER,
        at_ms=T0 + 150,
        kind=DecisionKind.REPLACE,
        policy="static",
        reason=Reason.WORKER_LOST,
        mode=Mode.REMOTE,
        orchestration=Orchestration.CONCURRENT,
        prefill_worker="p0",
        prefill_epoch=3,
        decode_worker="d0",
        decode_epoch=4,
        queue_length=6,
        waited_ms=50,
        slack_ms=8_850,
        prompt_tokens=13,
        session_tokens=77,
        candidates=looked_at,
        w_ttft=0.5,
        w_tpot=0.25,
        load=1.5,
        estimate=estimate,
        wished_policy="a",
        wished_orchestration="b",
        unmet=Unmet.NO_WORKER,
        policy_reason=Reason.EXPLORING,
    )
    assert record == whole
    alone = decision(
        ROUTER, placed(), DecisionKind.CANCEL, Reason.CLIENT_GONE, "static", T0, queue_length=0
    )
    assert alone == replace(
        whole, at_ms=T0, kind=DecisionKind.CANCEL, reason=Reason.CLIENT_GONE, queue_length=0,
        waited_ms=0, slack_ms=9_000, session_tokens=0, candidates=(), w_ttft=0.0, w_tpot=0.0,
        load=0.0, estimate=None, wished_policy="", wished_orchestration="", unmet=Unmet.NONE,
        policy_reason=Reason.UNKNOWN,
    )  # fmt: skip


@pytest.mark.parametrize(("cached_tokens", "told_tokens"), [(4, 4), (99, 10)])
def test_router_outcome_reports_progress_of_attempt(cached_tokens: int, told_tokens: int) -> None:
    """Cached tokens are of the prompt, without tokens of the answer behind it."""
    live, error = placed(), replace(WorkerLost("w").to_wire(), message="x" * 9_000)
    live.attempt.cached_tokens = cached_tokens
    record = outcome_of(ROUTER, live, OutcomeKind.FAILED, error, T0 + 300)
    assert record.error is not None and len(record.error.message) < len(error.message)
    assert replace(record, error=None) == Outcome(
        request_id="r1",
        session_id="s-r1",
        attempt=3,
        kind=OutcomeKind.FAILED,
        written_by=ROUTER,
        mode=Mode.REMOTE,
        prefill_worker="p0",
        decode_worker="d0",
        prompt_tokens=10,
        completion_tokens=5,
        cached_tokens=told_tokens,
        arrived_ms=live.request.arrived_ms,
        first_token_ms=T0 + 200,
        ended_ms=T0 + 300,
        orchestration=Orchestration.CONCURRENT,
    )
    assert outcome_of(ROUTER, live, OutcomeKind.CANCELLED, None, T0).error is None
