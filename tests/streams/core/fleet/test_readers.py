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
    decisions = [d for d in on.decisions if d.request_id == request_id]
    assert decisions[-1].kind is DecisionKind.CANCEL
    return decisions[-1].reason


def ended_as_lost(on: RouterHarness, *request_ids: str) -> None:
    """Each has one outcome, which says why, and nobody works for it."""
    for request_id in request_ids:
        outcome = on.outcomes[request_id]
        assert outcome.kind is OutcomeKind.CANCELLED
        assert outcome.error is not None
        assert outcome.error.message == f"{request_id}: cancelled: gateway_lost"
        assert reason_of(on, request_id) is Reason.GATEWAY_LOST
        assert request_id not in on.router.view()
        assert not [work for work in on.work_in_flight() if work.request_id == request_id]


@pytest.mark.parametrize("how", ["silence", "goodbye", "another process"])
def test_router_cancels_work_of_lost_gateway_after_grace(how: str) -> None:
    """Work without a reader ran to its end."""
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
def test_lost_gateway_ends_request_in_every_state(state: State) -> None:
    """Both sides of a pair drop it; a request that is being cancelled ends as cancelled."""
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


def test_gateway_keeps_streams_when_it_rejoins() -> None:
    """Its broker was away: the epoch is another, the process is the same."""
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


def test_router_loses_no_gateway_while_fleet_is_silent() -> None:
    """After a broker outage every member has a lease and the grace to be heard again."""
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
def test_lost_gateway_leaves_independent_requests_running(changes: dict[str, Any]) -> None:
    """The client asked for that, or no record says which process accepted the request."""
    on = replicas(gateway_grace_ms=GRACE_MS)
    gateway = with_gateway(on)
    on.asked_at(gateway, "r1", **changes)
    on.resume("r1", on.gateway("gateway-b"))
    for reader in on.gateways.values():
        reader.silent = True
    on.pass_ms(3 * LONG_MS)
    assert state_of(on, "r1") is State.DECODING


def test_resumed_request_continues_while_one_reader_lives() -> None:
    """It ends when its last reader is lost."""
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
def test_client_gone_is_ignored_where_client_reads_elsewhere(reason: CancelReason) -> None:
    """A frozen gateway finds its client gone when it wakes; the client's own wish counts."""
    on = replicas(gateway_grace_ms=GRACE_MS)
    gateway = with_gateway(on)
    on.asked_at(gateway, "r1")
    on.resume("r1", on.gateway("gateway-b"))
    on.cancel("r1", reason=reason)
    outdated = reason is CancelReason.CLIENT_GONE
    assert state_of(on, "r1") is (State.DECODING if outdated else State.CANCELLING)
    assert on.rebuilt(on.log).view() == on.router.view()


def test_resumption_after_client_gone_comes_too_late() -> None:
    """The order on the log decides which was first, in a rebuild too."""
    on = replicas(gateway_grace_ms=GRACE_MS)
    on.asked_at(with_gateway(on), "r1")
    on.cancel("r1", reason=CancelReason.CLIENT_GONE)
    on.resume("r1", on.gateway("gateway-b"))
    assert state_of(on, "r1") is State.CANCELLING
    assert on.rebuilt(on.log).view() == on.router.view()


def test_router_bounds_gateways_of_request() -> None:
    on = replicas()
    first = with_gateway(on)
    on.asked_at(first, "r1")
    gateways = [on.gateway(f"other-{number}") for number in range(READERS_MAX)]
    for gateway in gateways:
        on.resume("r1", gateway)
    names = {name for name, _ in on.router.tables.requests.readers}
    assert names == {gateway.gateway_id for gateway in gateways}
    assert on.rebuilt().view() == on.router.view()


def test_takeover_restores_readers_of_requests() -> None:
    """It begins the grace again and reads the resumptions in the log."""
    on = split(gateway_grace_ms=GRACE_MS)
    gateway, second = with_gateway(on), on.gateway("gateway-b")
    for request_id in ("resumed", "left"):
        on.asked_at(gateway, request_id)
    on.resume("resumed", second)
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


def test_late_outcome_after_gateway_loss_changes_nothing() -> None:
    """The router's outcome has the higher attempt, for every reader."""
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
def test_cancellation_counts_only_for_requests_of_its_tenant(tenant: str, early: bool) -> None:
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
