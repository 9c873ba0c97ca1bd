"""Ends a router whose consumer has died quietly: lag on what it owns, and nothing read for long.

Faust and aiokafka have been seen to stop fetching after a rebalance or a broker restart without
any error; a restart is the cure. A rebuild reads too, however long it takes. Asks the broker by a
client of its own.
"""

import asyncio
from typing import Protocol

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from schemas.errors import BrokerUnavailable
from schemas.settings import LogSettings
from streams.agents.app import TOPICS
from streams.agents.takeover import asking_client
from streams.config import RouterSettings


class Progress(Protocol):
    """What the watchdog looks at."""

    next_offsets: dict[tuple[str, int], int]
    records_read: int

    @property
    def owned(self) -> set[int]:
        """Partitions of every topic of the group."""


async def watch_progress(log: LogSettings, settings: RouterSettings, progress: Progress) -> None:
    """Raise BrokerUnavailable when nothing moves although there is something to read."""
    loop = asyncio.get_running_loop()
    before, moved_s = progress.records_read, loop.time()
    async with asking_client(log) as consumer:
        while True:
            await asyncio.sleep(settings.stall_exit_ms / 5_000)
            try:
                lag = await _lag(consumer, log, progress)
            except KafkaError:  # a broker that is away is no reason to end
                lag = 0
            if not lag or progress.records_read != before:
                before, moved_s = progress.records_read, loop.time()
            if (loop.time() - moved_s) * 1000 > settings.stall_exit_ms:
                raise BrokerUnavailable(
                    f"{lag} records to read on partitions {sorted(progress.owned)} and none "
                    f"read for {settings.stall_exit_ms} ms; the consumer is stuck, restart it"
                )


async def _lag(consumer: AIOKafkaConsumer, log: LogSettings, progress: Progress) -> int:
    places = [(topic, p) for topic in TOPICS for p in sorted(progress.owned)]
    if not places:
        return 0
    tps = {TopicPartition(log.topic_prefix + topic, p): (topic, p) for topic, p in places}
    ends = await consumer.end_offsets(list(tps))
    return sum(max(0, end - progress.next_offsets.get(tps[tp], 0)) for tp, end in ends.items())
