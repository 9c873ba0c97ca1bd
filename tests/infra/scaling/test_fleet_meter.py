"""What the fleet says, as the law wants it."""

from dataclasses import replace

import pytest

from infra.scaling.ewma import MEMORY_MS
from infra.scaling.fleet_meter import FleetMeter, merge_backlogs
from schemas.fleet import LEASE_MS, FleetView
from schemas.records import Heartbeat, Load, MemberState, Role
from tests.infra.scaling.samples import backlog, router_says
from tests.streams.builders import T0, beat, registration

DECODE = Role.DECODE


def view_with(*beats: Heartbeat) -> FleetView:
    view = FleetView()
    router_says(view, backlog())
    for number, one in enumerate(beats):
        view.apply(registration(one.member_id, DECODE, partition=number), number, T0)
        view.apply(one, 10 + number, T0)
    return view


def test_without_a_router_that_says_what_waits_nothing_is_known() -> None:
    view = FleetView()
    assert FleetMeter().measure(view, T0) is None
    router_says(view, None)  # of an older release
    assert FleetMeter().measure(view, T0) is None
    router_says(view, backlog())
    assert FleetMeter().measure(view, T0) is not None
    assert FleetMeter().measure(view, T0 + LEASE_MS + 1) is None


def test_a_pool_is_who_serves_in_it_with_the_credits_of_all_routers() -> None:
    one = beat("d0", 1, {DECODE: 6}, at_ms=T0)
    other = beat("d1", 1, {DECODE: 8}, at_ms=T0)
    starting = replace(beat("d2", 1, {DECODE: 8}, at_ms=T0), state=MemberState.STARTING)
    shared = (*one.grants, replace(one.grants[0], router_id="router-9"))
    found = FleetMeter().measure(view_with(replace(one, grants=shared), other, starting), T0)
    assert found is not None
    assert (found.pools[DECODE].present, found.pools[DECODE].slots) == (2, 10)
    assert found.pools[Role.PREFILL].present == 0 and found.shards == ()


def test_what_is_under_way_is_a_mean_of_the_last_seconds() -> None:
    def holding(seq: int, running: int) -> Heartbeat:
        now = beat("d0", seq, {DECODE: 8}, at_ms=T0)
        return replace(now, load=Load(running=running, waiting=1))

    measuring, view = FleetMeter(), view_with(holding(1, 7))
    first = measuring.measure(view, T0)
    assert first is not None and first.pools[DECODE].under_way == 8
    view.apply(holding(2, 0), 20, T0)
    later = measuring.measure(view, T0 + 1_000)
    assert later is not None and 7 < later.pools[DECODE].under_way < 8
    for second in range(2, int(5 * MEMORY_MS / 1_000)):
        view.members["d0"].seen_ms = view.members["router-0"].seen_ms = T0 + 1_000 * second
        later = measuring.measure(view, T0 + 1_000 * second)
    assert later is not None and later.pools[DECODE].under_way == pytest.approx(1, abs=0.1)


def test_a_rate_that_grows_evenly_is_known_to() -> None:
    measuring, view = FleetMeter(), FleetView()
    for second in range(300):
        router_says(view, backlog(requests_per_s=4 + 0.1 * second))
        now_ms = view.members["router-0"].seen_ms = T0 + 1_000 * second
        found = measuring.measure(view, now_ms)
    assert found is not None and found.growth_per_s2 == pytest.approx(0.1, rel=0.05)


def test_backlogs_of_several_routers_are_one() -> None:
    one = backlog(waiting=3, oldest_ms=500, slack_ms=4_000, requests_per_s=1.0, prefill_ms=100.0)
    other = backlog(waiting=2, oldest_ms=900, slack_ms=9_000, requests_per_s=3.0, prefill_ms=300.0)
    idle = backlog(requests_per_s=0.0, prefill_ms=7.0)
    found = merge_backlogs([one, other, idle])
    assert (found.waiting, found.oldest_ms, found.slack_ms) == (5, 900, 4_000)
    assert (found.requests_per_s, found.prefill_ms) == (4.0, 250.0)
    assert merge_backlogs([idle, idle]).prefill_ms == 7.0
