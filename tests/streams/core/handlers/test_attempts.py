"""The router when KV, workers or clients go away, case by case."""

import pytest

from schemas.errors import MESSAGE_CHARS_MAX
from schemas.fleet import LEASE_MS
from schemas.records import (
    DecisionKind,
    MemberState,
    Mode,
    OutcomeKind,
    PhaseKind,
    Reason,
    Role,
    WireError,
    Work,
    WorkPhase,
)
from streams.core.effects import Dispatch, End
from streams.core.events import (
    PhaseArrived,
    Tick,
)
from streams.core.handlers import endings
from streams.core.handlers.endings import ATTEMPTS_MAX, LOSSES_MAX
from streams.core.states import State
from tests.streams import builders
from tests.streams.core.router_harness import PARTITION, RouterHarness
from tests.streams.core.router_setups import replicas, split, state_of, to_decoding


@pytest.mark.parametrize("life_ms", [0, 999])
def test_decode_computes_prompt_again_when_kv_expires_soon(life_ms: int) -> None:
    on = split()
    on.request("r1", tokens=10)
    work = on.works[0]
    on.phase(work, PhaseKind.PREFILL_DONE, kv=builders.handle(work, on.now_ms + life_ms))
    decode = on.works[-1]
    assert (decode.kv, decode.mode, decode.attempt) == (None, Mode.LOCAL, 1)
    assert (decode.first_seq, decode.first_char) == (1, 3)
    assert on.decisions[-1].reason is Reason.KV_EXPIRED
    assert [c.worker_id for c in on.cancels] == ["p0"]  # frees what it holds


def test_worker_in_both_roles_drops_expired_kv_without_order() -> None:
    """A second order, by its other topic, could drop the answer."""
    on = split()
    on.request("r1", tokens=10)
    work = on.works[0]
    on.workers["d0"].window = 0
    on.beat(on.workers["d0"])
    both = builders.registration("p0", Role.PREFILL, Role.DECODE)
    on.fleet(both)
    credits = {Role.PREFILL: 2, Role.DECODE: 2}
    on.fleet(builders.beat("p0", on.workers["p0"].seq + 1, credits, epoch=1))
    on.workers["p0"].role = Role.DECODE  # what it takes next
    on.phase(work, PhaseKind.PREFILL_DONE, kv=builders.handle(work, on.now_ms))
    decode = on.works[-1]
    assert (decode.worker_id, decode.mode, decode.kv) == ("p0", Mode.LOCAL, None)
    assert on.decisions[-1].reason is Reason.KV_EXPIRED
    assert not on.cancels


def test_router_places_request_again_after_kv_producer_is_lost() -> None:
    on = split(prefills=2)
    on.workers["d0"].window = 0
    on.beat(on.workers["d0"])
    on.request("r1")
    on.phase(on.works[0], PhaseKind.PREFILL_DONE)
    assert state_of(on, "r1") is State.HANDING_OVER
    on.worker("p0", Role.PREFILL, window=4)  # a new life: the KV is gone
    assert on.works[-1].attempt == 2
    assert on.decisions[-1].kind is DecisionKind.REPLACE
    assert on.decisions[-1].reason is Reason.KV_PRODUCER_GONE
    failures = on.router.tables.requests.by_id["r1"].failures
    assert (failures.losses, failures.faults) == (1, 0)  # its worker was lost, not at fault


def test_next_router_knows_why_request_is_placed_again() -> None:
    on = replicas(2, says_at_once=False)
    on.request("r1")
    on.phase(on.works[0], PhaseKind.FAILED)
    assert state_of(on, "r1") is State.CONTINUING
    live = on.rebuilt(list(on.log)).tables.requests.by_id["r1"]
    assert live.failures.reason is Reason.WORKER_FAILED  # so the next decision is `replace`


@pytest.mark.parametrize("how", ["silent", "gone", "epoch"])
def test_router_places_requests_again_after_worker_is_lost(how: str) -> None:
    on = replicas(2)
    on.request("r1")
    worker = on.workers["x0"]
    if how == "silent":
        worker.silent = True
        on.pass_ms(LEASE_MS - 250)
        assert len(on.works) == 1
        on.pass_ms(500)
    elif how == "gone":
        worker.state = MemberState.GONE
        on.beat(worker)
        assert len(on.works) == 1  # its outcome may still be on its way
        worker.silent = True
        on.pass_ms(LEASE_MS + 250)
    else:
        on.worker("x0", Role.REPLICA, window=4)
    assert on.works[-1].attempt == 2
    assert on.decisions[-1].reason is Reason.WORKER_LOST
    on.outcome(on.works[0])  # the first attempt is void
    assert state_of(on, "r1") is State.DECODING
    on.outcome(on.works[1])
    assert not on.router.view()


def test_router_loses_no_worker_while_it_hears_nothing() -> None:
    on = replicas(2)
    on.request("r1")
    on.now_ms += 10 * LEASE_MS  # nothing was heard from anyone
    on.apply(Tick())
    on.pass_ms(250)
    assert len(on.works) == 1


@pytest.mark.parametrize(
    ("kind", "tries"), [(PhaseKind.FAILED, ATTEMPTS_MAX), (PhaseKind.REFUSED, LOSSES_MAX)]
)
def test_router_retries_failed_or_refused_phase_up_to_limit(kind: PhaseKind, tries: int) -> None:
    """A refusal says that the worker has no room and nothing about the request."""
    on = replicas(tries + 1)
    on.request("r1")
    for attempt in range(1, tries + 1):
        assert on.works[-1].attempt == attempt
        on.phase(on.works[-1], kind)
    outcome = on.outcomes["r1"]
    assert (outcome.kind, outcome.attempt) == (
        OutcomeKind.FAILED,
        tries + 1,
    )  # one of the router's own
    assert outcome.error is not None and outcome.error.code == "engine_failed"
    assert f"after {tries} attempts" in outcome.error.message
    assert on.decisions[-1].reason is Reason.ATTEMPTS_EXHAUSTED


def test_worker_losses_use_up_no_attempts() -> None:
    """Under kills every few seconds a request may outlive many workers."""
    on = replicas(LOSSES_MAX + 2)
    on.request("r1")
    for attempt in range(1, LOSSES_MAX):
        assert on.works[-1].attempt == attempt
        on.worker(on.works[-1].worker_id, Role.REPLICA)
    on.phase(on.works[-1], PhaseKind.FAILED)
    assert on.works[-1].attempt == LOSSES_MAX + 1
    on.worker(on.works[-1].worker_id, Role.REPLICA)
    outcome = on.outcomes["r1"]
    assert outcome.error is not None
    assert f"after {LOSSES_MAX + 1} attempts" in outcome.error.message


def test_router_sends_no_work_to_refusing_worker_until_heartbeat() -> None:
    on = replicas(1)
    on.request("r1")
    on.phase(on.works[0], PhaseKind.REFUSED)
    assert state_of(on, "r1") is State.QUEUED
    on.beat(on.workers["x0"])
    assert on.works[-1].attempt == 2


def test_non_retriable_error_fails_request() -> None:
    on = replicas()
    on.request("r1")
    error = WireError(code="invalid_request", message="bad grammar", retriable=False)
    effects = on.phase(on.works[0], PhaseKind.FAILED, error=error)
    (end,) = [e for e in effects if isinstance(e, End)]
    assert (end.outcome.kind, end.outcome.error) == (OutcomeKind.FAILED, error)
    assert on.decisions[-1].reason is Reason.REQUEST_FAILED


def test_phase_without_error_fails_request_with_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "ATTEMPTS_MAX", 1)
    on = replicas()
    on.request("r1")
    on.phase(on.works[0], PhaseKind.FAILED, error=None)
    error = on.outcomes["r1"].error
    assert error is not None and "gave no reason" in error.message


def test_cancellation_ends_queued_request_at_once() -> None:
    on = RouterHarness()
    on.request("r1")
    on.cancel("r1")
    assert on.outcomes["r1"].kind is OutcomeKind.CANCELLED
    assert on.decisions[-1].reason is Reason.CLIENT_REQUEST


def test_cancellation_before_its_request_ends_it() -> None:
    on = replicas()
    on.cancel("r1")
    on.request("r1")
    assert on.outcomes["r1"].kind is OutcomeKind.CANCELLED
    assert not on.works


@pytest.mark.parametrize("end", ["outcome", "failed", "lost", "overdue"])
def test_cancellation_of_placed_request_waits_for_worker(end: str) -> None:
    on = replicas(2)
    on.request("r1")
    on.cancel("r1")
    on.cancel("r1")  # repeated: nothing
    (cancel,) = on.cancels
    assert (cancel.worker_id, cancel.attempt) == ("x0", 1)
    assert state_of(on, "r1") is State.CANCELLING
    if end == "outcome":
        on.outcome(on.works[0], kind=OutcomeKind.CANCELLED)
    elif end == "failed":
        on.phase(on.works[0], PhaseKind.FAILED)
    elif end == "lost":
        on.worker("x0", Role.REPLICA)
    else:
        on.pass_ms(60_000 + 5_500)
    assert on.outcomes["r1"].kind is OutcomeKind.CANCELLED
    assert not on.router.view()


def test_cancellation_during_prefill_ends_request_with_prefill() -> None:
    on = split()
    on.request("r1")
    on.cancel("r1")
    on.phase(on.works[0], PhaseKind.PREFILL_DONE)
    assert on.outcomes["r1"].kind is OutcomeKind.CANCELLED
    assert len(on.works) == 1


def test_cancellation_between_prefill_and_decode_frees_kv() -> None:
    on = split()
    on.workers["d0"].window = 0
    on.beat(on.workers["d0"])
    on.request("r1")
    on.phase(on.works[0], PhaseKind.PREFILL_DONE)
    on.cancel("r1")
    assert [c.worker_id for c in on.cancels] == ["p0"]
    assert on.outcomes["r1"].kind is OutcomeKind.CANCELLED


@pytest.mark.parametrize(("received", "expected"), [(False, ["d0", "p0"]), (True, ["d0"])])
def test_cancellation_during_decode_reaches_workers_that_hold_kv(
    received: bool, expected: list[str]
) -> None:
    on = split()
    decode = to_decoding(on)
    if received:
        on.phase(decode, PhaseKind.KV_RECEIVED)
    on.cancel("r1")
    assert [c.worker_id for c in on.cancels] == expected


def test_missed_kv_makes_decode_compute_and_frees_producer() -> None:
    on = split()
    decode = to_decoding(on)
    error = WireError(code="kv_unavailable", message="4 tries", retriable=True)
    on.phase(decode, PhaseKind.KV_MISSED, error=error)
    decision = on.decisions[-1]
    assert (decision.kind, decision.reason) == (DecisionKind.COMPUTE, Reason.KV_MISSED)
    assert state_of(on, "r1") is State.DECODING
    assert [c.worker_id for c in on.cancels] == ["p0"]  # which kept it
    assert on.rebuilt(list(on.log)).view() == on.router.view()
    on.cancel("r1")
    assert [c.worker_id for c in on.cancels] == ["p0", "d0"]


@pytest.mark.parametrize("state", [State.HANDING_OVER, State.DECODING])
def test_rebuild_places_request_again_after_worker_is_lost(state: State) -> None:
    on = split()
    if state is State.HANDING_OVER:
        on.workers["d0"].window = 0
        on.beat(on.workers["d0"])
    on.request("r1")
    on.phase(on.works[0], PhaseKind.PREFILL_DONE)
    assert state_of(on, "r1") is state
    past_events = list(on.log)
    on.worker("p0", Role.PREFILL)
    on.worker("d0", Role.DECODE)
    router = on.rebuilt(past_events)
    assert router.view()["r1"][:5] == ("r1", PARTITION, State.CONTINUING, 1, None)
    reason = router.tables.requests.by_id["r1"].failures.reason
    expected = Reason.KV_PRODUCER_GONE if state is State.HANDING_OVER else Reason.WORKER_LOST
    assert reason is expected


def test_rebuild_trusts_handoff_decision_without_its_phase() -> None:
    on = split()
    to_decoding(on)
    past_events = [event for event in on.log if not isinstance(event, PhaseArrived)]
    assert on.rebuilt(past_events).view()["r1"][2] is State.DECODING


def test_rebuild_sends_no_kv_handle_for_handoff_without_kv() -> None:
    on = split()
    on.request("r1")
    on.phase(on.works[0], PhaseKind.PREFILL_DONE, kv=builders.handle(on.works[0], on.now_ms))
    on.taken_over()
    first, second = on.works[-2:]
    assert second.kv is None and second.mode is Mode.LOCAL
    assert second == first


def test_router_ignores_failure_from_worker_that_only_keeps_kv() -> None:
    on = split()
    on.workers["d0"].window = 0
    on.beat(on.workers["d0"])
    on.request("r1")
    on.phase(on.works[0], PhaseKind.PREFILL_DONE)
    on.phase(on.works[0], PhaseKind.FAILED)
    assert state_of(on, "r1") is State.HANDING_OVER
    assert on.rebuilt().view() == on.router.view()


def test_router_clips_worker_error_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "ATTEMPTS_MAX", 1)
    scene = replicas(window=1)
    (work,) = [e.record for e in scene.request("r1") if isinstance(e, Dispatch)]
    assert isinstance(work, Work)
    error = WireError(code="engine_failed", message="x" * 500_000, retriable=True)
    (end,) = [e for e in scene.phase(work, PhaseKind.FAILED, error=error) if isinstance(e, End)]
    assert end.outcome.error is not None
    assert len(end.outcome.error.message) == MESSAGE_CHARS_MAX


def test_handovers_of_other_pairs_pass_those_that_wait_for_their_own() -> None:
    on = RouterHarness(policy="pairs")
    for number, window in enumerate((1, 4)):
        on.worker(f"p{number}", Role.PREFILL, window=4)
        on.worker(f"d{number}", Role.DECODE, window=window)
    on.pass_ms(250)
    for number in range(5):
        on.request(f"r{number}")
    prompts = list(on.works)
    first_pair = [work for work in prompts if work.worker_id == "p0"]
    for work in [*first_pair, *(work for work in prompts if work.worker_id == "p1")]:
        on.phase(work, PhaseKind.PREFILL_DONE)

    def decode_works() -> list[Work]:
        return [work for work in on.works if work.phase is WorkPhase.DECODE]

    handed = [work.worker_id for work in decode_works()]
    assert handed.count("d0") == 1 and handed.count("d1") == len(prompts) - len(first_pair)
    on.outcome(next(work for work in decode_works() if work.worker_id == "d0"))
    assert [work.worker_id for work in decode_works()].count("d0") == 2
