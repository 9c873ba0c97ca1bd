"""What requests have used: told once each, however they end, and whoever dies meanwhile."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.fleet import LEASE_MS
from schemas.records import Endpoint, OutcomeKind, PhaseKind, Priority, Usage, WireError
from streams.core.events import OutcomeArrived, PhaseArrived, UsageLoaded
from streams.core.handlers.endings import usage_of
from streams.core.requests.live import new_live_request, note_work
from tests.streams import builders
from tests.streams.builders import T0
from tests.streams.core.router_harness import PARTITION, RouterHarness
from tests.streams.core.router_setups import replicas, split, to_decoding


def untold(on: RouterHarness) -> None:
    """The last router has written none of it."""
    on.log = [event for event in on.log if not isinstance(event, UsageLoaded)]
    on.used.clear()


def test_usage_has_answer_tokens_and_time_of_all_workers() -> None:
    on = split()
    changes: dict[str, Any] = {"tenant": "t", "priority": Priority.BATCH, "choice": 1}
    changes |= {"parent_id": "call", "endpoint": Endpoint.COMPLETION, "session_id": "talk"}
    on.request("r1", **changes)
    on.phase(on.works[0], PhaseKind.PREFILL_DONE, started_ms=on.now_ms - 40)
    outcome = builders.outcome(on.works[1], on.now_ms, worker_ms=200.0, cached_tokens=4)
    on.record(OutcomeArrived(outcome, PARTITION))
    usage = on.used["r1"]
    assert {name: getattr(usage, name) for name in changes} == changes
    assert usage.model == "tiny"
    assert (usage.kind, usage.attempt, usage.worker_ms) == (OutcomeKind.COMPLETED, 1, 240.0)
    assert usage.prompt_tokens == outcome.prompt_tokens
    assert (usage.cached_tokens, usage.completion_tokens) == (4, outcome.completion_tokens)
    assert (usage.arrived_ms, usage.ended_ms) == (on.now_ms, outcome.ended_ms)


def test_usage_counts_failed_attempt_once_though_read_twice() -> None:
    on = replicas(2)
    on.request("r1")
    on.phase(on.works[0], PhaseKind.FAILED, started_ms=on.now_ms - 30)
    on.outcome(on.works[1], worker_ms=100.0)
    assert on.used["r1"].worker_ms == 130.0
    untold(on)
    on.log += [event for event in on.log if isinstance(event, PhaseArrived)]
    on.taken_over()
    assert on.used["r1"].worker_ms == 130.0


def test_usage_counts_passages_and_probe_inserts_as_retrieved() -> None:
    on = replicas()
    on.request("r1", retrieval=builders.retrieval(T0 + 5_000))
    on.retrieved("r1", builders.passage(1))
    (work,) = on.works
    put_in = len(work.prompt_tokens) // 4 - 10
    assert put_in > 0
    on.outcome(work, prompt_tokens=10 + put_in, retrieved_tokens=7)
    usage = on.used["r1"]
    assert (usage.prompt_tokens, usage.retrieved_tokens) == (17 + put_in, 7 + put_in)
    untold(on)
    on.taken_over()
    assert on.used["r1"] == usage


def test_usage_takes_first_outcome_of_attempt_after_takeover_too() -> None:
    on = replicas()
    on.request("r1")
    on.outcome(on.works[0], completion_tokens=3)
    usage = on.used["r1"]
    on.outcome(on.works[0], completion_tokens=5)
    assert on.used["r1"] == usage
    untold(on)
    on.taken_over()
    assert on.used["r1"] == usage


@pytest.mark.parametrize("kind", ["shed", "expired", "cancelled", "failed"])
def test_router_records_usage_for_every_end_of_its_own(kind: str) -> None:
    on = replicas(1, queue_requests_max=1, window=1, deadline_grace_ms=100)
    on.request("busy")
    if kind == "shed":
        on.request("r1")
        on.request("r2")
        (usage,) = on.used.values()
    elif kind == "expired":
        on.request("r1", deadline_ms=on.now_ms + 100)
        on.pass_ms(300)
        usage = on.used["r1"]
    elif kind == "cancelled":
        on.request("r1")
        on.cancel("r1")
        usage = on.used["r1"]
    else:
        error = WireError(code="invalid_request", message="no", retriable=False)
        on.phase(on.works[0], PhaseKind.FAILED, error=error)
        (usage,) = on.used.values()
    assert (usage.kind.value, usage.completion_tokens, usage.prompt_tokens) == (kind, 0, 10)


def test_takeover_records_missing_usage() -> None:
    """Usage is recorded however a request ended, and for no live one."""
    on = replicas(1, window=9)
    for name in ("whole", "given_up", "written", "living"):
        on.request(name)
    on.outcome(on.works[0])
    on.outcome(on.works[2])
    on.cancel("given_up")
    on.outcome(on.works[1], kind=OutcomeKind.CANCELLED)
    usages = dict(on.used)
    on.log = [e for e in on.log if not isinstance(e, UsageLoaded) or e.request_id == "written"]
    on.used.clear()
    on.taken_over()
    assert on.used == {name: usages[name] for name in ("whole", "given_up")}
    on.taken_over()  # the harness would find a second one
    on.outcome(on.works[-1])
    assert on.used.keys() == {"whole", "given_up", "living"}


def test_usage_takes_counting_outcome_in_any_order() -> None:
    on = replicas(2)
    on.request("r1")
    on.phase(on.works[0], PhaseKind.FAILED)
    low = builders.outcome(on.works[0], on.now_ms, completion_tokens=3)
    on.record(OutcomeArrived(low, PARTITION))
    assert not on.used
    on.outcome(on.works[1], completion_tokens=5)
    assert on.used["r1"].completion_tokens == 5
    untold(on)
    on.log.sort(key=lambda event: not isinstance(event, OutcomeArrived))
    on.taken_over()
    assert (on.used["r1"].attempt, on.used["r1"].completion_tokens) == (2, 5)


def test_router_repeats_no_usage_for_live_request_with_usage_in_log() -> None:
    """No writer does that; if one did, sums would stay right."""
    on = split()
    work = to_decoding(on)
    on.log.append(UsageLoaded("r1", PARTITION))
    on.taken_over()
    on.outcome(work)
    assert not on.router.view() and not on.used


def test_router_ignores_usage_record_after_rebuild() -> None:
    on = replicas()
    on.request("r1")
    assert on.apply(UsageLoaded("r1", PARTITION)) == []
    on.outcome(on.works[0])
    assert isinstance(on.used["r1"], Usage)


def test_usage_adds_time_of_worker_in_both_roles() -> None:
    """Prefill, a failed decode and the answer all count, though one worker did them."""
    on = replicas()
    on.request("r1")
    request = on.accepted["r1"]
    live, first_work = new_live_request(request, PARTITION), on.works[0]
    for attempt in (1, 2):
        work = replace(first_work, attempt=attempt)
        prefill_done = builders.phase(work, PhaseKind.PREFILL_DONE, T0 + 40, started_ms=T0)
        note_work(live, prefill_done)
        note_work(live, prefill_done)  # read twice
        if attempt == 1:
            note_work(live, builders.phase(work, PhaseKind.FAILED, T0 + 30, started_ms=T0))
    end = builders.outcome(replace(first_work, attempt=2), T0, worker_ms=100.0)
    assert end.written_by == first_work.worker_id
    assert usage_of(live, end).worker_ms == 40 + 30 + 40 + 100


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("placed_again", [False, True])
def test_usage_counts_late_phases_of_void_attempts(is_replaced: bool, placed_again: bool) -> None:
    """Once the live router ignored them, and the next one counted them."""
    on = split(2, says_at_once=placed_again)
    on.request("r1")
    (first,) = on.works
    on.workers[first.worker_id].silent = True
    on.pass_ms(LEASE_MS + 250)
    late = builders.phase(first, PhaseKind.PREFILL_DONE, on.now_ms, started_ms=on.now_ms - 40)
    on.record(PhaseArrived(late, PARTITION))
    assert on.rebuilt().view() == on.router.view()
    if is_replaced:
        on.taken_over()
    if not placed_again:
        on.report_progress("r1", 1)
    on.phase(on.works[-1], PhaseKind.PREFILL_DONE, started_ms=on.now_ms - 20)
    on.outcome(on.works[-1], worker_ms=100.0)
    assert on.used["r1"].worker_ms == 160.0


@pytest.mark.parametrize("by_router", [True, False])
def test_takeover_cancels_work_of_request_that_has_ended(by_router: bool) -> None:
    """The last router may have died before it told the workers (seed 1691)."""
    on = split()
    work = to_decoding(on)
    ends = {"attempt": 2, "written_by": "another router"} if by_router else {}
    on.record(OutcomeArrived(builders.outcome(work, on.now_ms, **ends), PARTITION))
    untold(on)
    on.cancels.clear()
    on.taken_over()
    assert [cancel.worker_id for cancel in on.cancels] == ["p0", "d0"][: 1 + by_router]
    assert {(cancel.attempt, cancel.void) for cancel in on.cancels} == {(1, True)}
