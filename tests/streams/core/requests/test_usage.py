"""What requests have used: told once each, however they end, and whoever dies meanwhile."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.fleet import LEASE_MS
from schemas.records import Endpoint, OutcomeKind, PhaseKind, Priority, Usage, WireError
from streams.core.events import OutcomeArrived, PhaseArrived, UsageLoaded
from streams.core.requests.live import new_live_request, note_work
from streams.core.requests.usage import usage_of
from tests.streams import builders
from tests.streams.builders import T0
from tests.streams.core.router_harness import PARTITION, RouterHarness
from tests.streams.core.router_setups import replicas, split, to_decoding


def untold(on: RouterHarness) -> None:
    """The last router has written none of it."""
    on.log = [event for event in on.log if not isinstance(event, UsageLoaded)]
    on.used.clear()


def test_an_answer_tells_its_tokens_and_the_time_of_all_its_workers() -> None:
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


def test_what_failed_attempts_have_cost_counts_once_though_it_is_read_twice() -> None:
    on = replicas(2)
    on.request("r1")
    on.phase(on.works[0], PhaseKind.FAILED, started_ms=on.now_ms - 30)
    on.outcome(on.works[1], worker_ms=100.0)
    assert on.used["r1"].worker_ms == 130.0
    untold(on)
    on.log += [event for event in on.log if isinstance(event, PhaseArrived)]
    on.taken_over()
    assert on.used["r1"].worker_ms == 130.0


def test_passages_and_what_probes_put_in_count_as_looked_up() -> None:
    on = replicas()
    on.request("r1", retrieval=builders.retrieval(T0 + 5_000))
    on.retrieved("r1", builders.passage(1))
    (work,) = on.works
    put_in = len(work.prompt_tokens) // 4 - 10
    assert put_in > 0
    on.outcome(work, prompt_tokens=10 + put_in, retrieved_tokens=7)
    told = on.used["r1"]
    assert (told.prompt_tokens, told.retrieved_tokens) == (17 + put_in, 7 + put_in)
    untold(on)
    on.taken_over()
    assert on.used["r1"] == told


def test_of_several_ends_of_an_attempt_the_first_counts_for_the_next_router_too() -> None:
    on = replicas()
    on.request("r1")
    on.outcome(on.works[0], completion_tokens=3)
    told = on.used["r1"]
    on.outcome(on.works[0], completion_tokens=5)
    assert on.used["r1"] == told
    untold(on)
    on.taken_over()
    assert on.used["r1"] == told


@pytest.mark.parametrize("kind", ["shed", "expired", "cancelled", "failed"])
def test_every_end_by_the_router_tells_what_was_used(kind: str) -> None:
    on = replicas(1, queue_requests_max=1, window=1, deadline_grace_ms=100)
    on.request("busy")
    if kind == "shed":
        on.request("r1")
        on.request("r2")
        (found,) = on.used.values()
    elif kind == "expired":
        on.request("r1", deadline_ms=on.now_ms + 100)
        on.pass_ms(300)
        found = on.used["r1"]
    elif kind == "cancelled":
        on.request("r1")
        on.cancel("r1")
        found = on.used["r1"]
    else:
        error = WireError(code="invalid_request", message="no", retriable=False)
        on.phase(on.works[0], PhaseKind.FAILED, error=error)
        (found,) = on.used.values()
    assert (found.kind.value, found.completion_tokens, found.prompt_tokens) == (kind, 0, 10)


def test_a_router_that_comes_after_tells_what_the_last_one_has_not_written() -> None:
    """However it ended, and of no other."""
    on = replicas(1, window=9)
    for name in ("whole", "given_up", "written", "living"):
        on.request(name)
    on.outcome(on.works[0])
    on.outcome(on.works[2])
    on.cancel("given_up")
    on.outcome(on.works[1], kind=OutcomeKind.CANCELLED)
    told = dict(on.used)
    on.log = [e for e in on.log if not isinstance(e, UsageLoaded) or e.request_id == "written"]
    on.used.clear()
    on.taken_over()
    assert on.used == {name: told[name] for name in ("whole", "given_up")}
    on.taken_over()  # the harness would find a second one
    on.outcome(on.works[-1])
    assert on.used.keys() == {"whole", "given_up", "living"}


def test_the_outcome_that_counts_is_told_whatever_comes_first() -> None:
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


def test_what_lives_though_its_usage_is_written_tells_nothing_again() -> None:
    """No writer does that; should one, sums stay right."""
    on = split()
    work = to_decoding(on)
    on.log.append(UsageLoaded("r1", PARTITION))
    on.taken_over()
    on.outcome(work)
    assert not on.router.view() and not on.used


def test_usage_is_told_to_whoever_owns_the_partition_alone() -> None:
    """A record of usage that is read later changes nothing."""
    on = replicas()
    on.request("r1")
    assert on.apply(UsageLoaded("r1", PARTITION)) == []
    on.outcome(on.works[0])
    assert isinstance(on.used["r1"], Usage)


def test_a_worker_in_both_roles_tells_the_time_of_both() -> None:
    """The end of an answer took its writer's prefill for its own beginning, and a failed decode
    wrote over it."""
    on = replicas()
    on.request("r1")
    request = on.accepted["r1"]
    live, taken = new_live_request(request, PARTITION), on.works[0]
    for attempt in (1, 2):
        work = replace(taken, attempt=attempt)
        done = builders.phase(work, PhaseKind.PREFILL_DONE, T0 + 40, started_ms=T0)
        note_work(live, done)
        note_work(live, done)  # read twice
        if attempt == 1:
            note_work(live, builders.phase(work, PhaseKind.FAILED, T0 + 30, started_ms=T0))
    end = builders.outcome(replace(taken, attempt=2), T0, worker_ms=100.0)
    assert end.written_by == taken.worker_id
    assert usage_of(live, end).worker_ms == 40 + 30 + 40 + 100


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("placed_again", [False, True])
def test_late_words_of_attempts_that_were_given_up_count_whoever_reads_them(
    is_replaced: bool, placed_again: bool
) -> None:
    """The live router ignored them, and the next one counted them."""
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
def test_a_router_that_comes_after_stops_what_the_last_one_ended(by_router: bool) -> None:
    """It may have died before it told the workers, of whom one that ended it knows (seed 1691)."""
    on = split()
    work = to_decoding(on)
    ends = {"attempt": 2, "written_by": "another router"} if by_router else {}
    on.record(OutcomeArrived(builders.outcome(work, on.now_ms, **ends), PARTITION))
    untold(on)
    on.cancels.clear()
    on.taken_over()
    assert [cancel.worker_id for cancel in on.cancels] == ["p0", "d0"][: 1 + by_router]
    assert {(cancel.attempt, cancel.void) for cancel in on.cancels} == {(1, True)}
