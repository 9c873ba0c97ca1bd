"""A worker that runs beside a test, with a scripted engine and a log in memory."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from schemas.records import (
    MemberState,
    Role,
    WorkPhase,
)
from schemas.settings import LogSettings, ModelSettings
from tests.schemas.examples import TRACEPARENT
from tests.waits import until
from tests.workers.fakes import (
    MODEL,
    WORKER,
    FakeEngine,
    FakeKvEngine,
    FakeLog,
    FakeMembership,
    FakeReader,
    clients,
)
from workers.config import WorkerSettings
from workers.llm.engine import Engine
from workers.runtime import WorkerProcess
from workers.serving import ServingSettings


class RunningWorker:
    """A worker that runs beside the test."""

    def __init__(
        self, *roles: Role, running_max: int = 4, exchanges_kv: bool = False, **settings: Any
    ) -> None:
        self.engine = FakeKvEngine(running_max) if exchanges_kv else FakeEngine(running_max)
        self.log = FakeLog()
        self.stop = asyncio.Event()
        self.settings = {"drain_timeout_ms": 60_000, **settings}
        bundle, memberships = clients(self.log)
        self.process = WorkerProcess(
            bundle,
            ServingSettings(
                log=LogSettings(request_timeout_ms=20_000),
                worker=WorkerSettings(**self.settings),
                model=ModelSettings(name=MODEL),
            ),
            roles or (Role.PREFILL, Role.DECODE),
            worker_id=WORKER,
        )
        self.memberships = memberships  # of one life after the other
        self.task: asyncio.Task[None] | None = None

    @property
    def meetings(self) -> list[Exception]:
        """Return the errors that the next memberships meet."""
        return self.log.meetings

    @property
    def membership(self) -> FakeMembership:
        return self.memberships[-1]

    async def start(self, engine: Callable[[int], Awaitable[Engine]] | None = None) -> None:
        self.task = asyncio.create_task(self.process.run(engine or self.engine, self.stop))

    async def ready(self) -> None:
        await self.lives(1)

    async def lives(self, number: int) -> None:
        """Wait until the membership with this number, counted from 1, is ready."""
        await until(lambda: len(self.memberships) >= number)
        await until(lambda: self.membership.states[-1] is MemberState.READY)

    @property
    def decode(self) -> FakeReader:
        return self.log.readers["decode"]

    async def wait_for_exit(self) -> BaseException | None:
        assert self.task is not None
        await asyncio.wait([self.task])
        return self.task.exception()

    async def submit(self, *orders: Any) -> None:
        """Put orders on their topics and wait until the engine has them."""
        job_count = len(self.engine.jobs) + len(orders)
        for order in orders:
            topic = "prefill" if order.phase is WorkPhase.PREFILL else "decode"
            self.log.readers[topic].put(order, [("traceparent", TRACEPARENT)])
        await until(lambda: len(self.engine.jobs) == job_count)


@asynccontextmanager
async def running_worker(*roles: Role, **settings: Any) -> AsyncIterator[RunningWorker]:
    worker = RunningWorker(*roles, **settings)
    await worker.start()
    await worker.ready()
    try:
        yield worker
    finally:
        worker.stop.set()
        assert worker.task is not None
        worker.task.cancel()
        await asyncio.gather(worker.task, return_exceptions=True)
