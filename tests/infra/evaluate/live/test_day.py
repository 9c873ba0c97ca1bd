"""A day and night on stacks, as far as it needs none."""

from dataclasses import replace

import pytest

from infra.evaluate.live.conversations import LiveTurn
from infra.evaluate.live.day import DAY, PATIENCE, fleet_of, targets, try_smaller_fleets
from infra.evaluate.studies.day_and_night import DayComparison, FleetResult
from infra.simulator.cluster import READY_MS
from infra.simulator.shape import ClusterShape
from schemas.records import Role

BAR = 0.99
COUNTS = [(READY_MS, {Role.PREFILL: 1, Role.DECODE: 1})]


def fleet(pools: str, in_time: float) -> FleetResult:
    return replace(fleet_of(DAY, pools, COUNTS, [LiveTurn(number=1)]), in_time=in_time)


@pytest.mark.parametrize(
    ("enough", "tried"),
    [
        ("3P3D", ["3P3D", "2P3D", "3P2D"]),
        ("2P3D", ["3P3D", "2P3D", "1P3D", "2P2D"]),
        ("1P1D", ["3P3D", "2P3D", "1P3D", "1P2D", "1P1D"]),
        ("4P4D", ["3P3D"]),
    ],
)
async def test_smaller_fleets_are_tried_while_they_hold(enough: str, tried: list[str]) -> None:
    least = ClusterShape.parse(enough)

    async def serve(pools: str) -> FleetResult:
        shape = ClusterShape.parse(pools)
        holds = shape.prefill >= least.prefill and shape.decode >= least.decode
        return fleet(pools, BAR if holds else 0.5)

    found = await try_smaller_fleets(ClusterShape(prefill=3, decode=3), serve, BAR)
    assert [each.pools for each in found] == tried


def test_what_failed_or_was_late_is_not_in_time() -> None:
    turns = [
        LiveTurn(number=1, ttft_ms=100.0, tpot_ms=40.0),
        LiveTurn(number=1, ttft_ms=DAY.ttft_ms + 1.0, tpot_ms=40.0),
        LiveTurn(number=1, ttft_ms=100.0, tpot_ms=DAY.tpot_ms + 1.0),
        None,
    ]
    found = fleet_of(DAY, "1P1D", COUNTS, turns)
    assert (found.requests, found.failed, found.in_time) == (4, 1, 0.25)
    assert found.worker_hours == pytest.approx(2 * DAY.minutes / 60)
    assert DayComparison(day=DAY, following=found, fixed=[found]).saved_share == 0


def test_the_law_is_told_the_targets_and_a_clock_as_fast_as_the_day() -> None:
    found = targets(DAY)
    assert (found.ttft_ms, found.tpot_ms) == (DAY.ttft_ms, DAY.tpot_ms)
    assert found.down_after_ms == PATIENCE["down_after_ms"] < 60_000
