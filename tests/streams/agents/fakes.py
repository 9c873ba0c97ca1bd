"""Stand-ins for what a router process talks to: its producer, and what Faust hands to an agent."""

import asyncio
import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

from schemas.codec import Codec
from schemas.rules.sizes import check_size
from schemas.settings import LogSettings
from streams.agents.partitions import OwnedPartitions
from streams.agents.router import RouterProcess
from streams.agents.usage import UsageWriter
from streams.config import RouterSettings
from streams.core.events import PartitionReady, PartitionTaken
from streams.log.faust.group import Place
from tests.streams.builders import T0

LOG = LogSettings(topic_prefix="test.")
CODEC = Codec()


async def standing() -> None:
    """A lease that nobody doubts."""


class FakeProducer:
    """Takes records and acknowledges when the test says so."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.at_once = at_once
        self.sends: list[tuple[str, Any, str, int, Any]] = []
        self.acks: list[asyncio.Future[None]] = []

    def session_partition(self, session_id: str) -> int:
        return 0

    async def send(
        self, topic: str, record: Any, *, key: str, partition: int, headers: Any = ()
    ) -> asyncio.Future[None]:
        if dataclasses.is_dataclass(record):
            check_size(record, len(CODEC.encode(record)))
        ack: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.at_once:
            ack.set_result(None)
        self.sends.append((topic, record, key, partition, headers))
        self.acks.append(ack)
        return ack

    async def send_raw(
        self, topic: str, value: Any, *, key: Any, partition: int, headers: Any = ()
    ) -> asyncio.Future[None]:
        return await self.send(topic, value, key=key, partition=partition, headers=headers)


class FakeEvent:
    """What Faust hands to an agent."""

    def __init__(self, value: bytes | None, offset: int = 0, headers: Any = ()) -> None:
        self.message = self
        self.topic, self.partition, self.offset = "test.requests", 0, offset
        self.timestamp, self.timestamp_type, self.key = T0 / 1000, 0, b"k"
        self.value, self.headers = value, headers
        self.acks: list[int] = []

    def ack(self) -> None:
        self.acks.append(self.offset)


class FakeUsage(UsageWriter):
    """Writes nothing; outcomes before `since` were written before usage was told."""

    since = 0

    async def take(self, partitions: Collection[int]) -> None:
        """Nobody is fenced."""

    async def begin(self, partitions: Iterable[int], read_to: dict[Place, int]) -> None:
        """Nothing is committed."""

    def is_older(self, partition: int, offset: int) -> bool:
        return offset < self.since


async def router_with_partition() -> tuple[OwnedPartitions, FakeProducer]:
    """A router that owns partition 0, which is rebuilt."""
    process = RouterProcess(LOG, RouterSettings(), router_id="router-a")
    producer = FakeProducer()
    process.producer = producer  # type: ignore[assignment]  # a fake
    process.usage = FakeUsage(LOG, CODEC, "router-a")
    process.outbox._producer = producer  # type: ignore[assignment]  # a fake
    process.outbox._wait_for_lease = standing  # it never joined a fleet
    process.apply(PartitionTaken(0), "taken", 0, 0)
    process.apply(PartitionReady(0), "ready", 0, 0)
    partitions = OwnedPartitions(process)
    partitions.gate.open(0)
    return partitions, producer
