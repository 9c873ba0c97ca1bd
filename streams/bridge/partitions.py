"""The partitions of prompts that a bridge owns, with one processor each.

Every rebalance revokes all partitions and assigns them again. Processors continue meanwhile, but
send no requests: a bridge that takes one of their partitions over fences them. A processor whose
partition is assigned here again has lost nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from schemas.settings import LogSettings
from streams.bridge.log_reader import prompt_record
from streams.bridge.partition_processor import PartitionProcessor
from streams.log.connecting import query_client
from streams.log.faust.app import consumer_record, pause_partition, resume_partition
from streams.log.faust.group import Group, Place
from streams.log.transactions import FullPlace

_LOOKS = 5  # checks within the time after which a consumer counts as stuck
WAITING_MAX = 64  # waiting records of a partition; beyond it, no more are fetched


class Delivery:
    """A queue of one partition's records between agents and the partition's processor.

    A processor takes a record when it has room. Agents do not wait for that: Faust passes records
    of all topics one after the other, so one full partition would block all others. Records wait
    here, and if there are many, fetching of their partition is paused.
    """

    def __init__(self, group: Group, processor: PartitionProcessor) -> None:
        self._group, self._processor = group, processor
        self._waiting: asyncio.Queue[Any] = asyncio.Queue()
        self._is_paused = False
        self._task = asyncio.create_task(self._hand_over())

    def put(self, event: Any) -> None:
        """Queue one event in order, and pause fetching when too many wait."""
        self._waiting.put_nowait(event)
        if self._waiting.qsize() >= WAITING_MAX:
            self._is_paused = True
            pause_partition(event)

    async def _hand_over(self) -> None:
        while True:
            await self._group.guard(self._hand_over_one(await self._waiting.get()))

    async def _hand_over_one(self, event: Any) -> None:
        await self._processor.take(prompt_record(consumer_record(event.message)))
        if self._is_paused and self._waiting.qsize() <= WAITING_MAX // 2:
            self._is_paused = False
            resume_partition(event)

    def end(self) -> None:
        """Drop the waiting records; the partition's next owner reads them again."""
        self._task.cancel()


class BridgePartitions:
    """The partitions that Faust has assigned to this bridge, with their processors."""

    def __init__(
        self,
        group: Group,
        make: Callable[[FullPlace], PartitionProcessor],
        wait_until_sent: Callable[[], Awaitable[None]],
    ) -> None:
        """Create one; `wait_until_sent` waits until all requests in flight are in the log."""
        self.group = group
        self._wait_until_sent = wait_until_sent
        self.may_ask = asyncio.Event()
        self._make = make
        self._processors: dict[FullPlace, PartitionProcessor] = {}
        self._deliveries: dict[FullPlace, Delivery] = {}  # by partition
        self._stopping: dict[FullPlace, asyncio.Task[None]] = {}  # latest one by partition

    async def take(self, topic: str, event: Any) -> None:
        """Take one record from an agent."""
        await self.group.guard(self._take(topic, event))

    async def _take(self, topic: str, event: Any) -> None:
        await self.may_ask.wait()
        delivery = self._deliveries.get((topic, event.message.partition))
        if delivery is not None and not self.group.has_failed:
            delivery.put(event)

    def on_assigned(self, places: set[Place]) -> None:
        """Set this bridge's partitions: stop processors of lost ones, start those of new ones."""
        self.group.on_assigned(places)
        for place in self._processors.keys() - places:
            self._deliveries.pop(place).end()
            ending = self._end(self._processors.pop(place), self._stopping.get(place))
            self._stopping[place] = task = asyncio.create_task(ending)
            task.add_done_callback(partial(self._has_stopped, place))
        for place in sorted(places - self._processors.keys()):
            processor = self._processors[place] = self._make(place)
            processor.begin(self._stopping.get(place))
            self._deliveries[place] = Delivery(self.group, processor)
        self.may_ask.set()

    @property
    def is_ready(self) -> bool:
        """Return whether all assigned partitions are taken over; there may be none."""
        return self.may_ask.is_set() and all(
            processor.is_ready for processor in self._processors.values()
        )

    async def _end(self, processor: PartitionProcessor, former: asyncio.Task[None] | None) -> None:
        await processor.stop()
        if former is not None:
            await asyncio.wait([former])

    def _has_stopped(self, place: FullPlace, task: asyncio.Task[None]) -> None:
        if self._stopping.get(place) is task:
            del self._stopping[place]

    async def on_revoked(self) -> None:
        """Pause requests, and wait until those in flight are in the log.

        When this returns, the group may assign the partitions to other bridges.
        """
        self.group.on_revoked()
        self.may_ask.clear()
        await self._wait_until_sent()

    async def stop(self) -> None:
        """Commit the answers that are ready, and stop; the next owners continue the rest."""
        processors = list(self._processors.values())
        self._processors.clear()
        for delivery in self._deliveries.values():
            delivery.end()
        self._deliveries.clear()
        if not self.group.has_failed:
            await asyncio.gather(
                *(processor.flush() for processor in processors), return_exceptions=True
            )
        await asyncio.gather(
            *(processor.stop() for processor in processors), *self._stopping.values()
        )

    async def watch(self, log: LogSettings, stall_ms: int) -> None:
        """Check regularly for records that Faust leaves out, until cancelled."""
        async with query_client(log, committed_only=True) as consumer:
            while True:
                await asyncio.sleep(stall_ms / 1_000 / _LOOKS)
                ends: Mapping[TopicPartition, int] = {}
                try:
                    if self._processors:
                        ends = await consumer.end_offsets(
                            [TopicPartition(*p) for p in self._processors]
                        )
                except KafkaError:
                    continue  # an unavailable broker is no reason to end
                for tp, end in ends.items():
                    processor = self._processors.get((tp.topic, tp.partition))
                    if processor is not None:
                        await processor.check_for_stall(end, stall_ms / 1_000)
