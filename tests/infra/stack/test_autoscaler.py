"""What the autoscaler has a stack do, without processes."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from infra.scaling.pools import PoolKey
from infra.scaling.scaler import ScalingPlan
from infra.scaling.settings import ScalingSettings
from infra.stack import autoscaler
from infra.stack.autoscaler import Autoscaler
from infra.stack.configuration import Settings
from infra.stack.plan import StackPlan
from schemas.errors import ConfigError, NotReady
from schemas.fleet import FleetView
from schemas.records import Backlog, Load, Role, WantedPool
from schemas.settings import ModelSettings
from tests.streams.builders import T0, beat, registration
from tests.waits import until

PREFILL, DECODE, RETRIEVAL = Role.PREFILL, Role.DECODE, Role.RETRIEVAL
AT_ONCE = ScalingSettings(up_after_ms=0, down_after_ms=0)


class StackOnPaper:
    """Notes what it is asked to do."""

    def __init__(self, plan: StackPlan, scaling: ScalingSettings = AT_ONCE) -> None:
        self.settings, self.plan = Settings(scaling=scaling), plan
        self.fleet = SimpleNamespace(view=FleetView(), is_silent=lambda now_ms: False)
        self.processes = {name: self.process(number) for number, name in enumerate(plan.names(), 1)}
        self.actions: list[tuple[Any, ...]] = []
        self.may_go = asyncio.Event()
        self.trouble: Exception | None = None

    def process(self, pid: int) -> Any:
        return SimpleNamespace(pid=pid, stopping=False, restarts=0)

    def state_of(self, name: str) -> str:
        member = self.fleet.view.members.get(name)
        return "starting" if member is None else member.state.value

    def serves(self, name: str, *roles: Role, running: int = 0) -> None:
        """The fleet hears from a worker."""
        record = registration(name, *roles, pid=self.processes[name].pid)
        self.fleet.view.apply(record, 0, T0)
        self.fleet.view.apply(beat(name, 1, {}, load=Load(running=running)), 1, T0)

    def add_worker(self, role: Role, model: str) -> str:
        its_model = model if self.settings.other_models else ""
        self.plan, name = self.plan.with_worker(role.value, its_model)
        self.processes[name] = self.process(99)
        self.actions.append(("start", name))
        return name

    async def load_model(self, name: str, model: str, *, role: Role) -> None:
        self.actions.append(("load", name, model, role.value))
        await self._goes()
        self.plan = self.plan.with_model(name, model)
        self.serves(name, role)

    async def drain_worker(self, name: str) -> None:
        self.processes[name].stopping = True
        self.actions.append(("drain", name))
        await self._goes()
        del self.processes[name]

    async def scale(self, **counts: int) -> None:
        self.actions.append(("scale", counts))
        await self._goes()

    async def move(
        self, fleet: Any, producer: Any, log: Any, name: str, roles: Any, **_: Any
    ) -> None:
        self.actions.append(("move", name, roles[0].value))
        await self._goes()
        self.serves(name, *roles)

    async def _goes(self) -> None:
        await self.may_go.wait()
        if self.trouble is not None:
            raise self.trouble


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> StackOnPaper:
    fake_stack = StackOnPaper(StackPlan(prefill=2, decode=2))
    monkeypatch.setattr(autoscaler, "move_worker", fake_stack.move)
    return fake_stack


def wants(**counts: int) -> ScalingPlan:
    pools = [
        WantedPool(role=Role(role), present=0, workers=count, work=0.0, why="")
        for role, count in counts.items()
    ]
    return ScalingPlan([Backlog()], pools)


def follow(scaler: Autoscaler, **counts: int) -> None:
    producer: Any = None
    scaler._follow(wants(**counts), producer)


async def settled(scaler: Autoscaler) -> None:
    await until(lambda: not scaler._under_way)


async def test_autoscaler_starts_and_drains_worker_once(stack: Any) -> None:
    scaler = Autoscaler(stack)
    follow(scaler, prefill=2, decode=3)
    follow(scaler, prefill=2, decode=3)  # the third starts yet
    assert stack.actions == [("start", "decode-2")]
    follow(scaler, prefill=1, decode=3)
    await until(lambda: len(stack.actions) == 2)
    follow(scaler, prefill=1, decode=3)  # it drains yet
    assert stack.actions[1:] == [("drain", "prefill-1")]
    stack.may_go.set()
    await settled(scaler)
    assert "prefill-1" not in stack.processes


async def test_autoscaler_moves_idle_worker_between_pools(stack: Any) -> None:
    for name, running in (("prefill-0", 0), ("prefill-1", 3), ("decode-0", 1), ("decode-1", 1)):
        stack.serves(name, Role(name.partition("-")[0]), running=running)
    scaler = Autoscaler(stack)
    for _ in range(3):
        follow(scaler, prefill=1, decode=3)
        await until(lambda: bool(stack.actions))
    assert stack.actions == [("move", "prefill-0", "decode")], "who does the least, once"
    stack.may_go.set()
    await settled(scaler)
    follow(scaler, prefill=1, decode=3)
    assert len(stack.actions) == 1, "it is counted where it is now"


async def test_autoscaler_retries_failed_step(stack: Any) -> None:
    stack.may_go.set()
    stack.trouble = NotReady("it starts yet")
    scaler = Autoscaler(stack)
    for tries in (1, 2):
        follow(scaler, prefill=1, decode=3)
        await until(lambda tries=tries: len(stack.actions) == tries)
        await settled(scaler)
    assert stack.actions == 2 * [("move", "prefill-1", "decode")]


async def test_autoscaler_skips_workers_with_several_roles(stack: Any) -> None:
    stack.serves("decode-1", PREFILL, DECODE)
    scaler = Autoscaler(stack)
    assert scaler._workers() == {
        PoolKey(PREFILL): ["prefill-0", "prefill-1"],
        PoolKey(DECODE): ["decode-0"],
        PoolKey(Role.REPLICA): [],
    }


async def test_autoscaler_acts_for_each_model() -> None:
    """What one model can spare loads another one, and models of other stacks are left alone."""
    plan = StackPlan().for_models({"a": {"replica": 3}, "b": {"replica": 1}})
    stack: Any = StackOnPaper(plan)
    stack.settings = stack.settings.with_models([ModelSettings(name="a"), ModelSettings(name="b")])
    for number, name in enumerate(plan.models):
        stack.serves(name, Role.REPLICA, running=number)
    scaler, producer = Autoscaler(stack), Any

    def see(**counts: int) -> None:
        pools = [
            WantedPool(role=Role.REPLICA, model=model, present=0, workers=n, work=0.0, why="")
            for model, n in counts.items()
        ]
        plan = ScalingPlan([Backlog(model=model) for model in counts], pools)
        scaler._follow(plan, producer)  # type: ignore[arg-type]

    for _ in range(2):
        see(a=1, b=3, c=2)
        await until(lambda: len(stack.actions) == 2)
    assert stack.actions == [
        ("load", "replica-0", "b", "replica"),
        ("load", "replica-1", "b", "replica"),
    ]
    stack.may_go.set()
    await settled(scaler)
    see(a=1, b=4, c=2)
    assert stack.actions[2:] == [("start", "replica-4")]
    assert stack.plan.counts("b")["replica"] == 4


async def test_autoscaler_scales_retrieval_pool(stack: Any) -> None:
    stack.plan = replace(stack.plan, retrieval=2, shards=2)
    scaler = Autoscaler(stack)
    for _ in range(2):
        follow(scaler, prefill=2, decode=2, retrieval=4)
        await until(lambda: bool(stack.actions))
    assert stack.actions == [("scale", {"retrieval": 4})]
    scaler._under_way["retrieval"].cancel()


async def test_autoscaler_without_router_or_broker_makes_no_plan(stack: Any) -> None:
    scaler = Autoscaler(stack)
    assert scaler._look() is None, "no router says what waits"
    stack.fleet.is_silent = lambda now_ms: True
    assert scaler._look() is None


async def test_autoscaler_learns_start_time_from_completed_starts(
    stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts that were ended or died on the way do not count."""
    scaler, now_s = Autoscaler(stack), 7.0
    monkeypatch.setattr(autoscaler, "monotonic", lambda: now_s)
    assert scaler._scaler.start_ms == ScalingSettings().start_ms
    follow(scaler, prefill=3, decode=3)
    assert set(scaler._started_s) == {"prefill-2", "decode-2"}
    now_s += 70
    stack.processes["prefill-2"].restarts = 1
    stack.serves("decode-2", DECODE)
    follow(scaler, prefill=3, decode=3)
    assert (scaler._started_s, scaler._scaler.start_ms) == ({}, 70_000)
    assert stack.actions == [("start", "prefill-2"), ("start", "decode-2")], "each is started once"
    follow(scaler, prefill=3, decode=4)
    now_s += 50
    stack.serves("decode-3", DECODE)
    follow(scaler, prefill=3, decode=4)
    assert scaler._scaler.start_ms == 60_000


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"workers_max": 17}, "scaling.workers_max: expected at most 16, .* found 17"),
        ({"copies_max": 5}, "scaling.copies_max: expected at most 4, .* found 5"),
    ],
)
def test_autoscaler_rejects_limits_above_partition_count(
    scaling: dict[str, int], message: str
) -> None:
    """A copy of a shard without a partition would never be ready."""
    paper: Any = StackOnPaper(StackPlan(retrieval=1), ScalingSettings(**scaling))
    with pytest.raises(ConfigError, match=message):
        Autoscaler(paper)


def test_autoscaler_ignores_copies_max_without_retrieval_pool() -> None:
    paper: Any = StackOnPaper(StackPlan(), ScalingSettings(copies_max=5))
    Autoscaler(paper)
