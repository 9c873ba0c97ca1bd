"""A day and night on stacks, as far as it needs none."""

from dataclasses import replace

import pytest

from infra.research.live.day import DAY, PATIENCE, targets, try_smaller_fleets
from infra.research.studies.day_and_night import DayComparison, FleetResult, fleet_of
from infra.simulator.cluster import READY_MS
from infra.simulator.shape import ClusterShape
from schemas.records import Role

BAR = 0.99
COUNTS = [(READY_MS, {Role.PREFILL: 1, Role.DECODE: 1})]


def fleet(pools: str, in_time: float) -> FleetResult:
    return replace(fleet_of(DAY, pools, COUNTS, [(0.0, 0.0)], 1), in_time=in_time)


@pytest.mark.parametrize(
    ("enough", "tried"),
    [
        ("3P3D", ["3P3D", "2P3D", "3P2D"]),
        ("2P3D", ["3P3D", "2P3D", "1P3D", "2P2D"]),
        ("1P1D", ["3P3D", "2P3D", "1P3D", "1P2D", "1P1D"]),
        ("4P4D", ["3P3D"]),
    ],
)
async def test_try_smaller_fleets_stops_at_missed_bar(enough: str, tried: list[str]) -> None:
    min_shape = ClusterShape.parse(enough)

    async def serve(pools: str) -> FleetResult:
        shape = ClusterShape.parse(pools)
        holds = shape.prefill >= min_shape.prefill and shape.decode >= min_shape.decode
        return fleet(pools, BAR if holds else 0.5)

    fleets = await try_smaller_fleets(ClusterShape(prefill=3, decode=3), serve, BAR)
    assert [result.pools for result in fleets] == tried


def test_fleet_counts_failed_and_late_turns_as_missed() -> None:
    times_ms = [(100.0, 40.0), (DAY.ttft_ms + 1.0, 40.0), (100.0, DAY.tpot_ms + 1.0)]
    fleet_result = fleet_of(DAY, "1P1D", COUNTS, times_ms, 4)
    assert (fleet_result.requests, fleet_result.failed, fleet_result.in_time) == (4, 1, 0.25)
    assert fleet_result.worker_hours == pytest.approx(2 * DAY.minutes / 60)
    assert DayComparison(day=DAY, following=fleet_result, fixed=[fleet_result]).saved_share == 0


def test_targets_pass_limits_and_clock_of_day() -> None:
    scaling_targets = targets(DAY)
    assert (scaling_targets.ttft_ms, scaling_targets.tpot_ms) == (DAY.ttft_ms, DAY.tpot_ms)
    assert scaling_targets.down_after_ms == PATIENCE["down_after_ms"] < 60_000
