"""Gateways that are lost, and what becomes of the answers that were read there."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.fleet import LEASE_MS
from schemas.records import (
    CancelReason,
    DecisionKind,
    MemberState,
    Orchestration,
    OutcomeKind,
    PhaseKind,
    Reason,
    Role,
    WorkPhase,
)
from streams.core.effects import End
from streams.core.events import Tick
from streams.core.requests.live import READERS_MAX
from streams.core.states import State
from tests.streams.builders import ALL, retrieval
from tests.streams.core.hand_played import HandPlayedGateway
from tests.streams.core.router_harness import RouterHarness
from tests.streams.core.router_setups import replicas, split, state_of, work_of

GRACE_MS = 4_000
LONG_MS = LEASE_MS + GRACE_MS + 1_500  # with the second between two looks, and a tick


def with_gateway(on: RouterHarness) -> HandPlayedGateway:
    """A gateway that has been there for a while."""
    gateway = on.gateway("gateway-a")
    on.pass_ms(500)
    return gateway


def reason_of(on: RouterHarness, request_id: str) -> Reason:
    """Why the request ended."""
    found = [d for d in on.decisions if d.request_id == request_id]
    assert found[-1].kind is DecisionKind.CANCEL
    return found[-1].reason


def ended_as_lost(on: RouterHarness, *request_ids: str) -> None:
    """Each has one outcome, which says why, and nobody works for it."""
    for request_id in request_ids:
        outcome = on.outcomes[request_id]
        assert outcome.kind is OutcomeKind.CANCELLED
        assert outcome.error is not None
        assert outcome.error.message == f"{request_id}: cancelled: gateway_lost"
        assert reason_of(on, request_id) is Reason.GATEWAY_LOST
        assert request_id not in on.router.view()
        assert not [work for work in on.held() if work.request_id == request_id]


@pytest.mark.parametrize("how", ["silence", "goodbye", "another process"])
def test_the_work_of_a_lost_gateway_ends_after_a_grace(how: str) -> None:
    """It ran to its end for nobody."""
    on = replicas(window=1, gateway_grace_ms=GRACE_MS)
    gateway = with_gateway(on)
    on.asked_at(gateway, "runs")
    on.asked_at(gateway, "waits")
    assert (state_of(on, "runs"), state_of(on, "waits")) == (State.DECODING, State.QUEUED)
    if how == "another process":
        on.gateway("gateway-a")
    elif how == "goodbye":
        on.beat_gateway(gateway, state=MemberState.GONE)
    gateway.silent = True
    on.pass_ms(GRACE_MS - 1_000)
    assert not on.outcomes
    on.pass_ms(LONG_MS - GRACE_MS + 1_000)
    ended_as_lost(on, "runs", "waits")
    assert [cancel.void for cancel in on.cancels] == [True]
    on.request("next")
    assert on.works[-1].request_id == "next", "the credit is free"
    assert not on.router.tables.requests.readers


@pytest.mark.parametrize("state", [state for state in State if state is not State.ENDED])
def test_it_ends_in_every_state(state: State) -> None:
    """Both sides of a pair are told; what a worker was told to end before, it ends."""
    orders = {State.ALLOCATING: "decode_first"}
    orders |= dict.fromkeys((State.PAIRED, State.RECEIVED), "concurrent")
    on = RouterHarness(
        gateway_grace_ms=GRACE_MS,
        orchestration=orders.get(state, "prefill_first"),
        says_at_once=state is not State.CONTINUING,
    )
    on.worker("p0", Role.PREFILL, window=1, can=ALL)
    on.worker("d0", Role.DECODE, window=0 if state is State.HANDING_OVER else 1, can=ALL)
    gateway = with_gateway(on)
    if state is State.QUEUED:
        for worker in on.workers.values():
            worker.window = 0
            on.beat(worker)
    searched = {"retrieval": retrieval(on.now_ms + 60_000)} if state is State.RETRIEVING else {}
    on.asked_at(gateway, "r1", **searched)
    if state in (State.HANDING_OVER, State.DECODING, State.CANCELLING, State.CONTINUING):
        on.phase(on.works[0], PhaseKind.PREFILL_DONE)
    if state is State.CONTINUING:
        on.phase(on.works[-1], PhaseKind.FAILED)
    if state is State.RECEIVED:
        on.phase(work_of(on, WorkPhase.DECODE), PhaseKind.KV_RECEIVED)
    if state is State.CANCELLING:
        on.cancel("r1")
    assert state_of(on, "r1") is state
    gateway.silent = True
    on.pass_ms(LONG_MS)
    if state is State.CANCELLING:
        assert "r1" not in on.outcomes
        on.outcome(on.works[-1], kind=OutcomeKind.CANCELLED)
        assert reason_of(on, "r1") is Reason.CLIENT_REQUEST
    else:
        ended_as_lost(on, "r1")


def test_a_gateway_that_joins_again_keeps_its_streams() -> None:
    """Its broker was away, not itself: another epoch, the same process."""
    on = replicas(gateway_grace_ms=GRACE_MS)
    gateway = with_gateway(on)
    on.asked_at(gateway, "r1")
    gateway.silent = True
    on.pass_ms(LEASE_MS + GRACE_MS - 1_000)
    on.gateway("gateway-a", same_process=True)
    on.pass_ms(2 * LONG_MS)
    assert state_of(on, "r1") is State.DECODING
    on.outcome(on.works[-1])
    assert on.outcomes["r1"].kind is OutcomeKind.COMPLETED


def test_while_nobody_is_heard_no_gateway_is_lost() -> None:
    """The broker is away for a minute: everybody is silent, and has a lease and the grace after
    that."""
    on = replicas(gateway_grace_ms=GRACE_MS)
    gateway = with_gateway(on)
    on.asked_at(gateway, "r1", deadline_ms=on.now_ms + 300_000)
    for _ in range(60):
        on.now_ms += 1_000
        on.apply(Tick())
    gateway.silent = True
    on.pass_ms(LEASE_MS + GRACE_MS - 1_000)
    assert "r1" not in on.outcomes
    on.pass_ms(LONG_MS)
    ended_as_lost(on, "r1")


@pytest.mark.parametrize(
    "changes", [{"keeps_running": True}, {"gateway_started_ms": 0}], ids=["continue", "older"]
)
def test_what_depends_on_no_gateway_goes_on(changes: dict[str, Any]) -> None:
    """The client asked for it, or nobody said which process accepted it."""
    on = replicas(gateway_grace_ms=GRACE_MS)
    gateway = with_gateway(on)
    on.asked_at(gateway, "r1", **changes)
    on.resume("r1", on.gateway("gateway-b"))
    for each in on.gateways.values():
        each.silent = True
    on.pass_ms(3 * LONG_MS)
    assert state_of(on, "r1") is State.DECODING


def test_what_was_resumed_elsewhere_goes_on_while_one_reader_lives() -> None:
    """And ends with the last one."""
    on = replicas(window=4, gateway_grace_ms=GRACE_MS)
    first = with_gateway(on)
    second = on.gateway("gateway-b")
    for request_id in ("resumed", "followed", "left"):
        on.asked_at(first, request_id)
    on.resume("followed", second)
    second.silent = True  # whoever follows elsewhere takes nothing from where it is read
    on.pass_ms(LONG_MS)
    assert not on.outcomes
    first.silent = True
    third = on.gateway("gateway-c")
    on.pass_ms(LEASE_MS)
    on.resume("resumed", third)
    on.resume("resumed", third)
    on.resume("unknown", third)
    on.pass_ms(LONG_MS)
    ended_as_lost(on, "followed", "left")
    assert state_of(on, "resumed") is State.DECODING
    third.silent = True
    on.pass_ms(LONG_MS)
    ended_as_lost(on, "resumed")
    on.resume("resumed", on.gateway("gateway-d"))
    assert not on.router.tables.requests.readers


@pytest.mark.parametrize("reason", list(CancelReason))
def test_a_gateway_gives_nothing_up_that_its_client_reads_elsewhere(reason: CancelReason) -> None:
    """It was frozen, and finds its client gone when it wakes; what the client itself wants
    counts."""
    on = replicas(gateway_grace_ms=GRACE_MS)
    gateway = with_gateway(on)
    on.asked_at(gateway, "r1")
    on.resume("r1", on.gateway("gateway-b"))
    on.cancel("r1", reason=reason)
    outdated = reason is CancelReason.CLIENT_GONE
    assert state_of(on, "r1") is (State.DECODING if outdated else State.CANCELLING)
    assert on.rebuilt(on.log).view() == on.router.view()


def test_a_client_that_comes_back_after_its_gateway_has_given_it_up_is_late() -> None:
    """The order on the log says which was first; so it does in a rebuild."""
    on = replicas(gateway_grace_ms=GRACE_MS)
    on.asked_at(with_gateway(on), "r1")
    on.cancel("r1", reason=CancelReason.CLIENT_GONE)
    on.resume("r1", on.gateway("gateway-b"))
    assert state_of(on, "r1") is State.CANCELLING
    assert on.rebuilt(on.log).view() == on.router.view()


def test_gateways_of_a_request_are_bounded() -> None:
    on = replicas()
    first = with_gateway(on)
    on.asked_at(first, "r1")
    others = [on.gateway(f"other-{number}") for number in range(READERS_MAX)]
    for other in others:
        on.resume("r1", other)
    names = {name for name, _ in on.router.tables.requests.readers}
    assert names == {other.gateway_id for other in others}
    assert on.rebuilt().view() == on.router.view()


def test_a_takeover_knows_where_answers_are_read() -> None:
    """It begins the grace anew, and reads what was resumed in the log."""
    on = split(gateway_grace_ms=GRACE_MS)
    gateway, other = with_gateway(on), on.gateway("gateway-b")
    for request_id in ("resumed", "left"):
        on.asked_at(gateway, request_id)
    on.resume("resumed", other)
    assert on.rebuilt().view() == on.router.view()
    assert on.rebuilt(on.log[::-1]).view() == on.router.view()
    gateway.silent = True
    on.pass_ms(LEASE_MS + GRACE_MS - 1_000)
    on.taken_over()
    on.pass_ms(2_000)
    assert not on.outcomes
    on.pass_ms(GRACE_MS)
    ended_as_lost(on, "left")
    assert "resumed" in on.router.view()
    assert on.rebuilt().view() == on.router.view()


def test_an_outcome_that_comes_too_late_changes_nothing() -> None:
    """The router's has the higher attempt, for every reader."""
    on = replicas(gateway_grace_ms=GRACE_MS)
    gateway = with_gateway(on)
    on.asked_at(gateway, "r1")
    gateway.silent = True
    on.pass_ms(LONG_MS)
    ended_as_lost(on, "r1")
    effects = on.outcome(replace(on.works[0], orchestration=Orchestration.NONE))
    assert not [effect for effect in effects if isinstance(effect, End)]
    assert on.outcomes["r1"].attempt > on.works[0].attempt


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("tenant", ["", "own", "another"])
def test_a_cancellation_counts_for_the_tenants_own_requests(tenant: str, early: bool) -> None:
    """DELETE at another gateway could not check whose request it was."""
    on = replicas()
    changes = {"tenant": tenant}
    if early:
        on.cancel("r1", tenant="another")  # does not stand in the way of the right one
        on.cancel("r1", **changes)
    on.request("r1", tenant="own")
    if not early:
        on.cancel("r1", **changes)
    assert on.rebuilt().view() == on.router.view()
    cancelled = "r1" in on.outcomes or state_of(on, "r1") is State.CANCELLING
    assert cancelled == (tenant != "another")
