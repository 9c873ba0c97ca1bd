"""Ends a router whose consumer has died quietly: lag on what it owns, and nothing read for long.

Faust and aiokafka have been seen to stop fetching after a rebalance or a broker restart without
any error; a restart is the cure. Asks the broker by a client of its own.
"""

import asyncio
from typing import Protocol

from aiokafka import AIOKafkaConsumer, TopicPartition

from schemas.errors import BrokerUnavailable
from schemas.settings import LogSettings
from streams.agents.app import TOPICS
from streams.agents.takeover import asking_client
from streams.config import RouterSettings
from streams.core.router import Router


class Watched(Protocol):
    """What the watchdog looks at."""

    router: Router
    seen: dict[tuple[str, int], int]


async def watch_progress(log: LogSettings, settings: RouterSettings, process: Watched) -> None:
    """Raise BrokerUnavailable when nothing moves although there is something to read."""
    loop = asyncio.get_running_loop()
    before, moved_s = dict(process.seen), loop.time()
    async with asking_client(log) as consumer:
        while True:
            await asyncio.sleep(settings.stall_exit_ms / 5_000)
            lag = await _lag(consumer, log, process)
            if not lag or process.seen != before:
                before, moved_s = dict(process.seen), loop.time()
            if (loop.time() - moved_s) * 1000 > settings.stall_exit_ms:
                raise BrokerUnavailable(
                    f"{lag} records to read on partitions {sorted(process.router.owned)} and none "
                    f"read for {settings.stall_exit_ms} ms; the consumer is stuck, restart it"
                )


async def _lag(consumer: AIOKafkaConsumer, log: LogSettings, process: Watched) -> int:
    places = [(topic, p) for topic in TOPICS for p in sorted(process.router.owned)]
    if not places:
        return 0
    tps = {TopicPartition(log.topic_prefix + topic, p): (topic, p) for topic, p in places}
    ends = await consumer.end_offsets(list(tps))
    return sum(max(0, end - process.seen.get(tps[tp], 0)) for tp, end in ends.items())
