"""Scales the pools of a stack: starts, drains and moves workers (`trivium up --autoscale`).

`infra/scaling` decides how many workers each pool wants, and when. About once a second this module
asks it, writes the result to the fleet topic, and starts the steps, which run in the background. It
does nothing without a broker or without a router.
"""

import asyncio
import logging
from collections.abc import Coroutine
from time import monotonic
from typing import Any

from infra.scaling.pools import LLM, PoolKey
from infra.scaling.scaler import Scaler, ScalingPlan
from infra.scaling.steps import DrainWorker, MoveWorker, ReloadWorker, StartWorker, steps
from infra.stack.announcer import Announcer
from infra.stack.launcher import Stack
from infra.stack.reassignment import move_worker
from schemas.errors import ConfigError, TriviumError
from schemas.records import MemberKind, MemberState, Role
from schemas.settings import LogSettings
from streams.log.cancellation import cancel_and_wait
from streams.log.clients import LogProducer
from streams.log.clock import wall_ms
from streams.log.registry import make_codec
from streams.log.retry import retry_forever

log = logging.getLogger("trivium.scaling")
LOOK_S = 1.0
MOVE_S = 60.0
_CLIENT = "trivium-scaling"
_RETRIEVAL = PoolKey(Role.RETRIEVAL)
_LLM_NAMES = {role.value: role for role in LLM}


class Autoscaler:
    """Scales one stack, from when it is ready until it stops."""

    def __init__(self, stack: Stack) -> None:
        settings = stack.settings
        scaling, log_settings = settings.scaling, settings.log
        _check("workers_max", scaling.workers_max, "worker", log_settings)
        if stack.plan.retrieval:
            _check("copies_max", scaling.copies_max, "retrieval", log_settings)
        self._stack = stack
        self._scaler = Scaler(settings.scaling)
        self._moving: dict[str, PoolKey] = {}  # by worker, the pool that it will be in
        self._started_s: dict[str, float] = {}  # by worker, of the workers that are still starting
        self._under_way: dict[str, asyncio.Task[None]] = {}  # by worker, or pool

    @property
    def start_ms(self) -> int:
        """Return how long a worker takes to start, in ms: as measured, or before as configured."""
        return self._scaler.start_ms

    async def run(self) -> None:
        """Scale the stack until cancelled."""
        try:
            await retry_forever(self._serve, "scaling", log)
        finally:
            await cancel_and_wait(*self._under_way.values())

    async def _serve(self) -> None:
        settings = self._stack.settings.log
        codec = await asyncio.to_thread(make_codec, settings)
        async with LogProducer(settings, codec, durable=True, client_id=_CLIENT) as producer:
            announcer = Announcer(producer, "up")
            while True:
                await asyncio.sleep(LOOK_S)
                look = self._look()
                if look is not None:
                    await announcer.announce(look.pools, wall_ms())
                    self._follow(look, producer)

    def _look(self) -> ScalingPlan | None:
        fleet, now_ms = self._stack.fleet, wall_ms()
        if fleet is None or fleet.is_silent(now_ms):
            return None
        return self._scaler.plan(fleet.view, now_ms)

    def _time_starts(self) -> None:
        """Record how long starts took, without workers that died or were drained meanwhile."""
        for name, began_s in list(self._started_s.items()):
            process, state = self._stack.processes.get(name), self._stack.state_of(name)
            if process is None or process.stopping or process.restarts:
                del self._started_s[name]
            elif state == MemberState.READY:
                del self._started_s[name]
                self._scaler.record_start(1_000 * (monotonic() - began_s))
                log.info("%s is there; a start takes %.1f s", name, self.start_ms / 1_000)

    def _follow(self, look: ScalingPlan, producer: LogProducer) -> None:
        self._time_starts()
        workers = self._workers()
        present = {pool: len(names) for pool, names in workers.items()}
        present[_RETRIEVAL] = self._stack.plan.retrieval
        targets = self._scaler.settle(look, present, wall_ms())
        served = {pool: count for pool, count in targets.items() if pool in present}
        for step in steps(workers, served):
            match step:
                case StartWorker(pool):
                    name = self._stack.add_worker(pool.role, pool.model)
                    self._started_s[name] = monotonic()  # not changed when the wall clock is set
                    log.info("%s is started", name)
                case DrainWorker(name):
                    self._begin(name, self._stack.drain_worker(name), "is drained")
                case MoveWorker(name, role) if name not in self._under_way:
                    self._moving[name] = PoolKey(role, self._model_of(name))
                    self._begin(name, self._move(name, role, producer), f"becomes {role}")
                case ReloadWorker(name, pool) if name not in self._under_way:
                    self._moving[name] = pool
                    self._begin(name, self._reload(name, pool), f"loads {pool.model}")
        copies = targets.get(_RETRIEVAL, present[_RETRIEVAL])
        if copies != present[_RETRIEVAL]:
            self._begin("retrieval", self._stack.scale(retrieval=copies), f"gets {copies} workers")

    def _workers(self) -> dict[PoolKey, list[str]]:
        """Return workers by the one pool that they are or will be in; idle workers come last.

        Workers that are starting count. Workers that are leaving do not.
        """
        members = self._stack.fleet.view.members if self._stack.fleet else {}
        by_pool: dict[PoolKey, list[tuple[int, int, str]]] = {
            PoolKey(role, model.served_name): []
            for model in self._stack.settings.models
            for role in LLM
        }
        for number, (name, kind) in enumerate(self._stack.plan.names().items()):
            process, role = self._stack.processes.get(name), _LLM_NAMES.get(name.rpartition("-")[0])
            if kind is not MemberKind.WORKER or role is None or process is None or process.stopping:
                continue
            member, running = members.get(name), 0
            if member is not None and member.registration.pid == process.pid:
                if len(member.registration.roles) > 1:
                    continue  # a user gave it several roles
                role = next(iter(member.registration.roles), role)
                running = member.load.running + member.load.waiting
            pool = self._moving.get(name, PoolKey(role, self._model_of(name)))
            by_pool[pool].append((-running, number, name))
        return {pool: [name for *_, name in sorted(rows)] for pool, rows in by_pool.items()}

    def _model_of(self, name: str) -> str:
        return self._stack.plan.models.get(name, self._stack.settings.model.served_name)

    async def _move(self, name: str, role: Role, producer: LogProducer) -> None:
        fleet, settings = self._stack.fleet, self._stack.settings.log
        assert fleet is not None, "who has looked has a fleet"
        try:
            await move_worker(fleet, producer, settings, name, [role], timeout_s=MOVE_S)
        finally:
            del self._moving[name]

    async def _reload(self, name: str, pool: PoolKey) -> None:
        try:
            await self._stack.load_model(name, pool.model, role=pool.role)
        finally:
            del self._moving[name]

    def _begin(self, key: str, work: Coroutine[Any, Any, None], what: str) -> None:
        """Run the step in the background, unless another step for the same key is running."""
        if key in self._under_way:
            work.close()
            return
        log.info("%s %s", key, what)

        async def run_step() -> None:
            try:
                await work
            except TriviumError as error:
                log.warning("%s: %s", key, error.message)
            finally:
                del self._under_way[key]

        self._under_way[key] = asyncio.create_task(run_step())


def _check(name: str, value: int, group: str, log_settings: LogSettings) -> None:
    """Raise ConfigError if there could be more members than partitions: each member needs one."""
    partitions = log_settings.partitions(group)
    if value > partitions:
        raise ConfigError(
            f"scaling.{name}: expected at most {partitions}, as many as there are partitions for "
            f"them ([log] {group}_partitions), found {value}"
        )
