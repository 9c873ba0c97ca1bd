"""What routers and workers say, for tests of scaling."""

from typing import Any

from infra.scaling.fleet_meter import FleetMeasurement, ModelMeasurement
from infra.scaling.pools import PoolLoad
from infra.scaling.settings import ScalingSettings
from schemas.fleet import FleetView
from schemas.records import (
    Backlog,
    Heartbeat,
    Load,
    MemberKind,
    MemberState,
    Registration,
    Role,
)
from tests.streams.builders import T0

TARGETS = ScalingSettings()


def backlog(**changes: Any) -> Backlog:
    """4 requests/s, of 1 000 tokens that prefill computes in 200 ms, answered in 5 s."""
    defaults: dict[str, Any] = {
        "requests_per_s": 4.0,
        "prompt_tokens": 1_000.0,
        "answer_tokens": 100.0,
        "prefill_ms": 200.0,
        "step_ms": 46.0,
        "sharing_ms": 0.5,
    }
    return Backlog(**{**defaults, **changes})


def measured(
    *, prefill: int = 1, decode: int = 1, replica: int = 0, slots: int = 8, **changes: Any
) -> ModelMeasurement:
    """Measure pools of these sizes, each worker with so many slots."""
    present = {Role.PREFILL: prefill, Role.DECODE: decode, Role.REPLICA: replica}
    pools = {role: PoolLoad(present=count, slots=slots) for role, count in present.items()}
    return ModelMeasurement(backlog=backlog(**changes), pools=pools)


def fleet_of(*models: ModelMeasurement, shards: tuple[PoolLoad, ...] = ()) -> FleetMeasurement:
    """Return the measurement of a fleet with these models."""
    return FleetMeasurement(models=models, shards=shards)


def router_says(view: FleetView, backlog: Backlog | None, name: str = "router-0") -> None:
    """Apply the registration and a heartbeat of a router."""
    member = view.members.get(name)
    if member is None:
        kind = MemberKind.ROUTER
        view.apply(Registration(member_id=name, epoch=1, kind=kind, started_ms=T0), 0, T0)
    beat = Heartbeat(
        member_id=name,
        epoch=1,
        seq=0 if member is None else member.beat_seq + 1,
        at_ms=T0,
        state=MemberState.READY,
        load=Load(),
        backlogs=() if backlog is None else (backlog,),
    )
    view.apply(beat, 1, T0)
