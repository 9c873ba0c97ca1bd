"""Some seconds of the day and night of `trivium evaluate scaling --live`."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.research.live.day import DAY, ENGINE, serve, targets
from infra.stack.plan import StackPlan
from schemas.records import Role
from schemas.settings import LogSettings
from tests.e2e.harness import lasting_stack, sim_settings

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(1_800)]
SHORT = replace(DAY, minutes=0.1, night_per_s=2.0, noon_per_s=4.0, workers_max=2)


@pytest.mark.parametrize("pools", ["1P1D", ""], ids=["fixed", "follows"])
async def test_fleet_serves_day_and_counts_worker_hours(
    kafka: LogSettings, tmp_path: Path, pools: str
) -> None:
    """Whether answers are in time depends on the machine."""
    settings = replace(sim_settings(kafka, **ENGINE), scaling=targets(SHORT))
    plan = StackPlan(prefill=1, decode=1, broker=False)
    fleet = await serve(lasting_stack(settings, plan, folder=tmp_path), SHORT, pools)
    assert (fleet.pools, fleet.failed) == (pools, 0)
    assert fleet.requests == len(SHORT.requests()) > 5 and fleet.ttft_p99_ms > 0
    assert fleet.worker_hours == pytest.approx(2 * SHORT.minutes / 60, rel=0.1)
    assert fleet.counts[0][1] == {Role.PREFILL: 1, Role.DECODE: 1}
