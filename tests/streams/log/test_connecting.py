"""Clients that ask; closing consumers: whoever is cancelled meanwhile is."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable

import pytest
from aiokafka import TopicPartition

from schemas.settings import LogSettings
from streams.log.clients import AssignedReader
from streams.log.connecting import query_client

pytestmark = pytest.mark.kafka
STEPS = 12  # of the loop; closing takes fewer


@contextlib.asynccontextmanager
async def asking(log: LogSettings) -> AsyncIterator[None]:
    """Open a query client that has its connections."""
    async with query_client(log) as client:
        await client.end_offsets([TopicPartition(log.topic_prefix + "fleet", 0)])
        yield


CLIENTS: dict[str, Callable[[LogSettings], contextlib.AbstractAsyncContextManager[object]]] = {
    "reader": lambda log: AssignedReader(log, "fleet", [0], client_id="r").reading("earliest"),
    "asking": asking,
}


async def test_query_client_knows_partitions_of_its_topics_at_start(
    kafka: LogSettings,
) -> None:
    topics = {kafka.topic_prefix + name for name in ("requests", "usage", "fleet")}
    async with query_client(kafka, topics=topics) as client:
        assert all(client.partitions_for_topic(topic) for topic in topics)


@pytest.mark.parametrize("client", CLIENTS)
async def test_closing_client_can_be_cancelled_at_any_step(kafka: LogSettings, client: str) -> None:
    """Otherwise the task would live on, and its canceller would wait for ever."""
    for steps in range(STEPS):
        is_open, end = asyncio.Event(), asyncio.Event()

        async def use(is_open: asyncio.Event = is_open, end: asyncio.Event = end) -> None:
            async with CLIENTS[client](kafka):
                is_open.set()
                await end.wait()

        task = asyncio.create_task(use())
        await is_open.wait()
        end.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        was_done = task.done()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or was_done, f"after {steps} steps"
    gc.collect()  # what is left says so now, which is an error here
