"""A stage on a real broker: topics that are read, workers that the test plays, and real routers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from schemas.codec import Codec
from schemas.records import Grant, JournalBatch, MemberKind, MemberState, Request, Role
from schemas.settings import LogSettings
from streams.agents.lifecycle import run_router
from streams.config import RouterSettings
from streams.log.clients import AssignedReader, LogProducer
from streams.log.clock import wall_ms
from streams.log.membership import Membership
from tests.long_leases import long_leases
from tests.streams import builders

SETTINGS = RouterSettings()


class Stage:
    """Topics, one producer, and what the test has read of each topic."""

    def __init__(self, log: LogSettings) -> None:
        self.log = log
        self.codec = Codec()
        self.producer = LogProducer(log, self.codec, durable=True, client_id="test")
        self._readers: dict[str, AssignedReader] = {}
        self.read: dict[str, list[Any]] = {}

    async def send(self, topic: str, record: Any, session_id: str) -> None:
        partition = self.producer.session_partition(session_id)
        await (await self.producer.send(topic, record, key=session_id, partition=partition))

    async def until(self, topic: str, fits: Callable[[Any], bool], count: int = 1) -> list[Any]:
        """Read a topic until so many records fit; returns those."""
        if topic not in self._readers:
            groups = {"prefill": "worker", "decode": "worker", "tokens": "gateway"}
            shared = topic in ("fleet", "journal", "prefixes") or ".dlq" in topic
            all_of = range(self.log.partitions(groups.get(topic, "session")))
            partitions = [0] if shared else all_of
            reader = AssignedReader(self.log, topic, list(partitions), client_id="test")
            await reader.start("earliest")
            self._readers[topic], self.read[topic] = reader, []
        while len(fitting := [r for r in self.read[topic] if fits(r)]) < count:
            for record in await self._readers[topic].batch(timeout_ms=1_000):
                raw = ".dlq" in topic
                self.read[topic].append(record if raw else self.codec.decode(record.value))
        return fitting

    async def close(self) -> None:
        for reader in self._readers.values():
            await reader.stop()
        await self.producer.stop()


@asynccontextmanager
async def stage(log: LogSettings) -> AsyncIterator[Stage]:
    """Where workers and routers meet; none of them is lost to a stall of the machine."""
    stage = Stage(log)
    await stage.producer.start()
    try:
        with long_leases():
            yield stage
    finally:
        await stage.close()


@asynccontextmanager
async def worker(on: Stage, worker_id: str, role: Role, credits: int) -> AsyncIterator[Membership]:
    """A member of the fleet that grants every router credits."""
    topic = "prefill" if role is Role.PREFILL else "decode"
    member = Membership(
        on.log,
        on.codec,
        on.producer,
        member_id=worker_id,
        kind=MemberKind.WORKER,
        roles=[role],
        lease_topics=[topic],
    )

    def grants() -> list[Grant]:
        routers = member.view.living(MemberKind.ROUTER, wall_ms())
        return [Grant(router_id=r.member_id, role=role, credits=credits) for r in routers]

    member.grant_source = grants
    await member.join(builders.capability(worker_id))
    member.set_state(MemberState.READY)
    task = asyncio.create_task(member.run())
    try:
        yield member
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await member.leave()


@asynccontextmanager
async def router(log: LogSettings, router_id: str = "router-a") -> AsyncIterator[None]:
    stop = asyncio.Event()
    task = asyncio.create_task(run_router(log, SETTINGS, router_id=router_id, stop=stop))
    try:
        yield
    finally:
        stop.set()
        await task
    assert not task.cancelled()


def fresh(request_id: str, **changes: Any) -> Request:
    now_ms = wall_ms()
    return builders.request(
        request_id, **{"arrived_ms": now_ms, "deadline_ms": now_ms + 600_000, **changes}
    )


def of(request_id: str, kind: type) -> Callable[[Any], bool]:
    return lambda record: isinstance(record, kind) and record.request_id == request_id  # type: ignore[attr-defined]


def applied(topic: str) -> Callable[[Any], bool]:
    """Lines of a journal with something from there."""
    return lambda record: isinstance(record, JournalBatch) and topic in record.topics
