"""What the autoscaler has a stack do, without processes."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from infra.scaling.scaler import ScalingPlan
from infra.scaling.settings import ScalingSettings
from infra.stack import autoscaler
from infra.stack.autoscaler import Autoscaler
from infra.stack.configuration import Settings
from infra.stack.plan import StackPlan
from schemas.errors import ConfigError, NotReady
from schemas.fleet import FleetView
from schemas.records import Backlog, Load, Role, WantedPool
from tests.streams.builders import T0, beat, registration
from tests.waiting import until

PREFILL, DECODE, RETRIEVAL = Role.PREFILL, Role.DECODE, Role.RETRIEVAL
AT_ONCE = ScalingSettings(up_after_ms=0, down_after_ms=0)


class StackOnPaper:
    """Notes what it is asked to do."""

    def __init__(self, plan: StackPlan, scaling: ScalingSettings = AT_ONCE) -> None:
        self.settings, self.plan = Settings(scaling=scaling), plan
        self.fleet = SimpleNamespace(view=FleetView(), is_silent=lambda now_ms: False)
        self.processes = {name: self.process(number) for number, name in enumerate(plan.names(), 1)}
        self.told: list[tuple[Any, ...]] = []
        self.may_go = asyncio.Event()
        self.trouble: Exception | None = None

    def process(self, pid: int) -> Any:
        return SimpleNamespace(pid=pid, stopping=False, restarts=0)

    def state_of(self, name: str) -> str:
        member = self.fleet.view.members.get(name)
        return "starting" if member is None else member.state.value

    def serves(self, name: str, *roles: Role, running: int = 0) -> None:
        """The fleet hears from a worker."""
        one = registration(name, *roles, pid=self.processes[name].pid)
        self.fleet.view.apply(one, 0, T0)
        self.fleet.view.apply(beat(name, 1, {}, load=Load(running=running)), 1, T0)

    def add_worker(self, role: Role) -> str:
        self.plan, name = self.plan.with_worker(role.value)
        self.processes[name] = self.process(99)
        self.told.append(("start", name))
        return name

    async def drain_worker(self, name: str) -> None:
        self.processes[name].stopping = True
        self.told.append(("drain", name))
        await self._goes()
        del self.processes[name]

    async def scale(self, **counts: int) -> None:
        self.told.append(("scale", counts))
        await self._goes()

    async def move(
        self, fleet: Any, producer: Any, log: Any, name: str, roles: Any, **_: Any
    ) -> None:
        self.told.append(("move", name, roles[0].value))
        await self._goes()
        self.serves(name, *roles)

    async def _goes(self) -> None:
        await self.may_go.wait()
        if self.trouble is not None:
            raise self.trouble


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> StackOnPaper:
    found = StackOnPaper(StackPlan(prefill=2, decode=2))
    monkeypatch.setattr(autoscaler, "move_worker", found.move)
    return found


def wants(**counts: int) -> ScalingPlan:
    pools = [
        WantedPool(role=Role(role), present=0, workers=count, work=0.0, why="")
        for role, count in counts.items()
    ]
    return ScalingPlan(Backlog(), pools)


def follow(scaler: Autoscaler, **counts: int) -> None:
    producer: Any = None
    scaler._follow(wants(**counts), producer)


async def settled(scaler: Autoscaler) -> None:
    await until(lambda: not scaler._under_way)


async def test_it_starts_and_drains_and_does_each_once(stack: Any) -> None:
    scaler = Autoscaler(stack)
    follow(scaler, prefill=2, decode=3)
    follow(scaler, prefill=2, decode=3)  # the third starts yet
    assert stack.told == [("start", "decode-2")]
    follow(scaler, prefill=1, decode=3)
    await until(lambda: len(stack.told) == 2)
    follow(scaler, prefill=1, decode=3)  # it drains yet
    assert stack.told[1:] == [("drain", "prefill-1")]
    stack.may_go.set()
    await settled(scaler)
    assert "prefill-1" not in stack.processes


async def test_a_worker_moves_from_the_pool_that_can_spare_it(stack: Any) -> None:
    for name, running in (("prefill-0", 0), ("prefill-1", 3), ("decode-0", 1), ("decode-1", 1)):
        stack.serves(name, Role(name.partition("-")[0]), running=running)
    scaler = Autoscaler(stack)
    for _ in range(3):
        follow(scaler, prefill=1, decode=3)
        await until(lambda: bool(stack.told))
    assert stack.told == [("move", "prefill-0", "decode")], "who does the least, once"
    stack.may_go.set()
    await settled(scaler)
    follow(scaler, prefill=1, decode=3)
    assert len(stack.told) == 1, "it is counted where it is now"


async def test_a_step_that_fails_is_tried_again(stack: Any) -> None:
    stack.may_go.set()
    stack.trouble = NotReady("it starts yet")
    scaler = Autoscaler(stack)
    for tries in (1, 2):
        follow(scaler, prefill=1, decode=3)
        await until(lambda tries=tries: len(stack.told) == tries)
        await settled(scaler)
    assert stack.told == 2 * [("move", "prefill-1", "decode")]


async def test_workers_with_several_roles_and_other_members_are_left_alone(stack: Any) -> None:
    stack.serves("decode-1", PREFILL, DECODE)
    scaler = Autoscaler(stack)
    assert scaler._workers() == {
        PREFILL: ["prefill-0", "prefill-1"],
        DECODE: ["decode-0"],
        Role.REPLICA: [],
    }


async def test_the_retrieval_pool_is_scaled_beside_them(stack: Any) -> None:
    stack.plan = replace(stack.plan, retrieval=2, shards=2)
    scaler = Autoscaler(stack)
    for _ in range(2):
        follow(scaler, prefill=2, decode=2, retrieval=4)
        await until(lambda: bool(stack.told))
    assert stack.told == [("scale", {"retrieval": 4})]
    scaler._under_way["retrieval"].cancel()


async def test_without_a_broker_nothing_is_known(stack: Any) -> None:
    scaler = Autoscaler(stack)
    assert scaler._look() is None, "no router says what waits"
    stack.fleet.is_silent = lambda now_ms: True
    assert scaler._look() is None


async def test_the_law_looks_as_far_ahead_as_a_start_took(
    stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as far as one that was ended or died on the way."""
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
    assert stack.told == [("start", "prefill-2"), ("start", "decode-2")], "each is started once"
    follow(scaler, prefill=3, decode=4)
    now_s += 50
    stack.serves("decode-3", DECODE)
    follow(scaler, prefill=3, decode=4)
    assert scaler._scaler.start_ms == 60_000


@pytest.mark.parametrize(
    ("scaling", "found"),
    [
        ({"workers_max": 17}, "scaling.workers_max: expected at most 16, .* found 17"),
        ({"copies_max": 5}, "scaling.copies_max: expected at most 4, .* found 5"),
    ],
)
def test_more_members_than_partitions_are_refused(scaling: dict[str, int], found: str) -> None:
    """A copy of a shard without a partition would never be ready."""
    paper: Any = StackOnPaper(StackPlan(retrieval=1), ScalingSettings(**scaling))
    with pytest.raises(ConfigError, match=found):
        Autoscaler(paper)


def test_copies_of_no_pool_are_not_checked() -> None:
    paper: Any = StackOnPaper(StackPlan(), ScalingSettings(copies_max=5))
    Autoscaler(paper)
