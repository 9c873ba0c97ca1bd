"""Pools that follow a load, in the simulator."""

from dataclasses import replace

import pytest

from infra.research.studies.day_and_night import Day, DayComparison, FleetResult, serve_day
from infra.simulator.elastic import worker_hours
from schemas.records import Role

SHORT = Day(
    minutes=4.0, night_per_s=1.0, noon_per_s=16.0, answer_tokens=50, start_ms=5_000.0, seed=3
)


@pytest.mark.slow
def test_pools_follow_day_in_time() -> None:
    """They begin with one prefill worker, grow, and shrink again towards the end."""
    fleet = serve_day(SHORT, "")
    assert fleet.in_time > 0.9
    sizes = [there.get(Role.PREFILL, 0) for _, there in fleet.counts]
    assert sizes[0] == 1 and max(sizes) >= 3 and sizes[-1] < max(sizes)
    assert fleet.worker_hours < max(sum(there.values()) for _, there in fleet.counts) * 4 / 60


def test_day_repeats_requests() -> None:
    first, second = SHORT.requests(), SHORT.requests()
    assert [request.at_ms for request in first] == [request.at_ms for request in second]
    assert SHORT.per_s(0.0) == 1.0 and SHORT.per_s(SHORT.day_ms / 2) == 16.0


def test_worker_hours_count_span_between_two_times() -> None:
    two, three = {Role.PREFILL: 1, Role.DECODE: 1}, {Role.PREFILL: 1, Role.DECODE: 2}
    counts = [(0.0, two), (1_800_000.0, three), (9_000_000.0, two)]
    assert worker_hours(counts, 0.0, 3_600_000.0) == pytest.approx(2.5)


def test_day_comparison_chooses_smallest_sufficient_fixed_fleet() -> None:
    fleet = FleetResult(
        pools="",
        requests=9,
        in_time=0.995,
        worker_hours=3.0,
        ttft_p99_ms=1,
        tpot_p99_ms=1,
        counts=[],
    )
    small, large = (
        replace(fleet, pools=pools, in_time=share, worker_hours=hours)
        for pools, share, hours in (("1P2D", 0.98, 3.0), ("2P2D", 0.991, 4.0))
    )
    comparison = DayComparison(day=SHORT, following=fleet, fixed=[small, large])
    assert (comparison.best, comparison.saved_share) == (large, 0.25)
    worse = replace(fleet, in_time=0.97)
    assert DayComparison(day=SHORT, following=worse, fixed=[small, large]).best == small
    assert DayComparison(day=SHORT, following=fleet, fixed=[small]).best is None
