"""What `trivium scale` prints, from a look at hand; `test_up_down.py` asks a fleet."""

import asyncio
import io
from dataclasses import replace

import pytest
from rich.console import Console

from infra.cli.operate.scale import _table, _tree, _watch, first_look
from infra.scaling.policy import wanted_pools
from infra.scaling.scaler import Scaler, ScalingPlan
from infra.stack import fleet_watch
from infra.stack.configuration import Settings
from infra.stack.fleet_watch import FleetWatch
from schemas.codec import Codec
from schemas.fleet import LEASE_MS
from schemas.records import Heartbeat, Load, MemberKind, MemberState, Registration, Role
from schemas.settings import LogSettings
from streams.log.clients import LogProducer
from streams.log.clock import wall_ms
from tests.infra.scaling.samples import TARGETS, backlog, fleet_of, measured
from tests.infra.watched_fleet import fleet
from tests.long_leases import long_leases
from tests.streams.builders import beat, registration
from tests.waits import until

LOOK = measured(waiting=3, oldest_ms=1_500, slack_ms=60_000)


def look() -> ScalingPlan:
    return ScalingPlan([LOOK.backlog], wanted_pools(fleet_of(LOOK), TARGETS))


def test_scale_table_shows_workers_and_reasons() -> None:
    out = io.StringIO()
    Console(file=out, width=160).print(_table(look()))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert lines[:2] == [
        "4.0 requests/s; 3 wait, the oldest for 1.5 s",
        "pool has wants work why",
    ]
    assert lines[2].startswith("prefill 1 2 0.86 4.3 prompts/s of 200 ms")


def test_scale_json_contains_backlog_and_pools() -> None:
    tree = _tree(look())
    assert tree["backlog"]["waiting"] == 3
    assert [(pool["role"], pool["present"]) for pool in tree["pools"]] == [
        ("prefill", 1),
        ("decode", 1),
    ]


def test_scale_shows_models_where_there_are_several() -> None:
    models = [replace(LOOK, backlog=replace(LOOK.backlog, model=name)) for name in ("a", "[b]")]
    backlogs = [model.backlog for model in models]
    plan = ScalingPlan(backlogs, wanted_pools(fleet_of(*models), TARGETS))
    out = io.StringIO()
    Console(file=out, width=160).print(_table(plan))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert lines[:3] == [
        "a: 4.0 requests/s; 3 wait, the oldest for 1.5 s",
        "[b]: 4.0 requests/s; 3 wait, the oldest for 1.5 s",
        "model pool has wants work why",
    ]
    assert [line.split()[:2] for line in lines[3:]] == [
        ["a", "prefill"],
        ["a", "decode"],
        ["[b]", "prefill"],
        ["[b]", "decode"],
    ]
    tree = _tree(plan)
    assert [backlog["model"] for backlog in tree["backlogs"]] == ["a", "[b]"]
    assert "backlog" not in tree and {pool["model"] for pool in tree["pools"]} == {"a", "[b]"}


async def test_scale_command_waits_for_silent_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine no heartbeat may arrive for the length of a lease."""
    watch, scaler = fleet(), Scaler(TARGETS)
    watch.changed = asyncio.Event()
    assert await first_look(scaler, watch) is None, "there is no router"
    router = registration("router-0", kind=MemberKind.ROUTER)
    watch.view.apply(router, 100, wall_ms() - 2 * LEASE_MS)
    looking = asyncio.create_task(first_look(scaler, watch))
    await asyncio.sleep(0)
    assert not looking.done()
    lives = beat("router-0", 1, backlogs=(backlog(),), at_ms=wall_ms())
    watch.view.apply(lives, 101, wall_ms() + 60_000)
    watch.changed.set()
    assert await looking is not None
    watch.view.members["router-0"].seen_ms = wall_ms() - 2 * LEASE_MS
    monkeypatch.setattr(fleet_watch, "SLOW_S", 0.01)
    assert await first_look(scaler, watch) is None


@pytest.mark.kafka
async def test_scale_command_publishes_scaling_target(
    kafka: LogSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    router = Registration(member_id="router-0", epoch=1, kind=MemberKind.ROUTER, started_ms=0)
    lives = Heartbeat(
        member_id="router-0",
        epoch=1,
        seq=0,
        at_ms=wall_ms(),
        state=MemberState.READY,
        load=Load(),
        backlogs=(backlog(),),
    )
    async with LogProducer(kafka, Codec(), durable=True, client_id="router-0") as producer:
        replica = registration("replica-0", Role.REPLICA), beat("replica-0", 1, {Role.REPLICA: 8})
        for record in (router, lives, *replica):
            await (await producer.send("fleet", record, key=record.member_id, partition=0))
    with long_leases():
        async with FleetWatch(kafka).followed() as fleet:
            watching = asyncio.create_task(_watch(Settings(log=kafka), publish=True, as_json=True))
            try:
                await until(lambda: fleet.view.scaling_target is not None or watching.done())
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            wanted_now = fleet.view.scaling_target
    assert wanted_now is not None and wanted_now.written_by == "scale"
    assert [pool.role for pool in wanted_now.pools] == [Role.REPLICA]
    assert '"requests_per_s": 4.0' in capsys.readouterr().out
