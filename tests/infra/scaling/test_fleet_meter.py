"""What the fleet says, as the law wants it."""

from dataclasses import replace

import pytest

from infra.scaling.ewma import MEMORY_MS
from infra.scaling.fleet_meter import FleetMeter, merge_backlogs
from schemas.fleet import LEASE_MS, FleetView
from schemas.records import Heartbeat, Load, MemberState, Role
from tests.infra.scaling.samples import backlog, router_says
from tests.streams.builders import T0, beat, capability, registration

DECODE = Role.DECODE


def view_with(*beats: Heartbeat) -> FleetView:
    view = FleetView()
    router_says(view, backlog())
    for number, heartbeat in enumerate(beats):
        view.apply(registration(heartbeat.member_id, DECODE, partition=number), number, T0)
        view.apply(heartbeat, 10 + number, T0)
    return view


def test_fleet_meter_measures_nothing_without_router_backlog() -> None:
    view = FleetView()
    assert FleetMeter().measure(view, T0) is None
    router_says(view, None)  # of an older release
    assert FleetMeter().measure(view, T0) is None
    router_says(view, backlog())
    assert FleetMeter().measure(view, T0) is not None
    assert FleetMeter().measure(view, T0 + LEASE_MS + 1) is None


def test_fleet_meter_counts_ready_workers_and_credits_of_all_routers() -> None:
    first = beat("d0", 1, {DECODE: 6}, at_ms=T0)
    second = beat("d1", 1, {DECODE: 8}, at_ms=T0)
    starting = replace(beat("d2", 1, {DECODE: 8}, at_ms=T0), state=MemberState.STARTING)
    shared = (*first.grants, replace(first.grants[0], router_id="router-9"))
    fleet = FleetMeter().measure(view_with(replace(first, grants=shared), second, starting), T0)
    assert fleet is not None and fleet.shards == ()
    (model,) = fleet.models
    assert (model.pools[DECODE].present, model.pools[DECODE].slots) == (2, 10)
    assert model.pools[Role.PREFILL].present == 0


def test_fleet_meter_averages_requests_in_flight() -> None:
    def holding(seq: int, running: int) -> Heartbeat:
        now = beat("d0", seq, {DECODE: 8}, at_ms=T0)
        return replace(now, load=Load(running=running, waiting=1))

    measuring, view = FleetMeter(), view_with(holding(1, 7))

    def under_way(now_ms: int) -> float:
        fleet = measuring.measure(view, now_ms)
        assert fleet is not None
        return fleet.models[0].pools[DECODE].under_way

    assert under_way(T0) == 8
    view.apply(holding(2, 0), 20, T0)
    assert 7 < under_way(T0 + 1_000) < 8
    for second in range(2, int(5 * MEMORY_MS / 1_000)):
        view.members["d0"].seen_ms = view.members["router-0"].seen_ms = T0 + 1_000 * second
        later = under_way(T0 + 1_000 * second)
    assert later == pytest.approx(1, abs=0.1)


def test_fleet_meter_estimates_growth_of_request_rate() -> None:
    measuring, view = FleetMeter(), FleetView()
    for second in range(300):
        router_says(view, backlog(requests_per_s=4 + 0.1 * second))
        now_ms = view.members["router-0"].seen_ms = T0 + 1_000 * second
        fleet = measuring.measure(view, now_ms)
    assert fleet is not None
    assert fleet.models[0].growth_per_s2 == pytest.approx(0.1, rel=0.05)


def test_fleet_meter_measures_each_model_apart() -> None:
    view = view_with()
    for number, model in enumerate(("a", "b", "b")):
        record = registration(f"d{number}", DECODE, partition=number)
        engine = replace(capability(f"d{number}"), model=model)
        view.apply(replace(record, capability=engine), number, T0)
        load = Load(running=number)
        view.apply(replace(beat(f"d{number}", 1, {DECODE: 8}, at_ms=T0), load=load), 9, T0)
    view.members["router-0"].backlogs = (backlog(model="a"), backlog(model="c", requests_per_s=1.0))
    fleet = FleetMeter().measure(view, T0)
    assert fleet is not None
    counts = {
        model.backlog.model: (model.pools[DECODE].present, model.pools[DECODE].under_way)
        for model in fleet.models
    }
    assert counts == {"a": (1, 0), "b": (2, 3), "c": (0, 0)}
    rates = [model.backlog.requests_per_s for model in fleet.models]
    assert rates == [4.0, 0.0, 1.0], "b was never called yet"


def test_backlog_without_model_is_of_only_model() -> None:
    view = view_with()
    record = registration("d0", DECODE, capability=capability("d0"))
    view.apply(record, 0, T0)
    view.apply(beat("d0", 1, {DECODE: 8}, at_ms=T0), 9, T0)
    fleet = FleetMeter().measure(view, T0)
    assert fleet is not None
    (model,) = fleet.models
    assert model.backlog == backlog(model="tiny") and model.pools[DECODE].present == 1


def test_backlog_merge_adds_counts_and_weights_times_by_rate() -> None:
    first = backlog(waiting=3, oldest_ms=500, slack_ms=4_000, requests_per_s=1.0, prefill_ms=100.0)
    second = backlog(waiting=2, oldest_ms=900, slack_ms=9_000, requests_per_s=3.0, prefill_ms=300.0)
    idle = backlog(requests_per_s=0.0, prefill_ms=7.0)
    merged_backlog = merge_backlogs([first, second, idle])
    assert (merged_backlog.waiting, merged_backlog.oldest_ms, merged_backlog.slack_ms) == (
        5,
        900,
        4_000,
    )
    assert (merged_backlog.requests_per_s, merged_backlog.prefill_ms) == (4.0, 250.0)
    assert merge_backlogs([idle, idle]).prefill_ms == 7.0
