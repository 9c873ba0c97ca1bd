"""From the fleet to how many workers each pool gets."""

from infra.scaling.scaler import Scaler, ScalingPlan
from infra.scaling.settings import ScalingSettings
from schemas.fleet import FleetView
from schemas.records import Role, WantedPool
from tests.infra.scaling.samples import backlog, router_says
from tests.streams.builders import T0, beat, registration

PREFILL, DECODE = Role.PREFILL, Role.DECODE
SETTINGS = ScalingSettings(up_after_ms=1_000, down_after_ms=60_000, workers_max=6)


def wants(prefill: int, decode: int) -> ScalingPlan:
    counts = {PREFILL: prefill, DECODE: decode}
    pools = [
        WantedPool(role=role, present=0, workers=count, work=0.0, why="")
        for role, count in counts.items()
    ]
    return ScalingPlan(backlog(), pools)


def test_scaler_plans_pools_from_fleet_view() -> None:
    view, scaler = FleetView(), Scaler(SETTINGS)
    assert scaler.plan(view, T0) is None
    router_says(view, backlog())
    for number, role in enumerate((PREFILL, DECODE)):
        view.apply(registration(role.value, role, partition=number), number, T0)
        view.apply(beat(role.value, 1, {role: 8}, at_ms=T0), 9, T0)
    look = scaler.plan(view, T0)
    assert look is not None and look.backlog == backlog()
    assert {p.role: (p.present, p.workers) for p in look.pools} == {PREFILL: (1, 2), DECODE: (1, 4)}


def test_scaler_shrinks_pool_at_once_at_workers_max() -> None:
    scaler, present = Scaler(SETTINGS), {PREFILL: 4, DECODE: 2}
    for second in range(3):
        targets = scaler.settle(wants(2, 4), present, T0 + 1_000 * second)
    assert targets == {PREFILL: 2, DECODE: 4}


def test_scaler_shrinks_pool_late_below_workers_max() -> None:
    scaler, present = Scaler(SETTINGS), {PREFILL: 3, DECODE: 2}
    for second in range(3):
        targets = scaler.settle(wants(2, 3), present, T0 + 1_000 * second)
    assert targets == {PREFILL: 3, DECODE: 3}
