"""How a router's life ends: what it had decided leaves, unless it is no longer its to say."""

import asyncio
from typing import Any

from streams.agents import lives
from streams.agents.partitions import OwnedPartitions
from tests.streams.agents.fakes import FakeProducer, router_with_partition
from tests.streams.core.router_setups import replicas
from tests.virtual import virtual


@virtual
async def test_a_router_whose_lease_is_lost_leaves_without_a_word() -> None:
    """It waited for what would never leave, and then flushed what it had buffered (issue 10, 9)."""
    for lost, expected in ((True, "discarded"), (False, "sent")):
        partitions, producer = await router_with_partition()
        assert await wound_up(partitions, producer, lost=lost) == [expected]
        said = {topic for topic, *_ in producer.sent}
        assert said == (set() if lost else {"decisions", "decode", "journal"})


async def wound_up(partitions: OwnedPartitions, producer: FakeProducer, *, lost: bool) -> list[str]:
    """How the producer is closed when the router winds up with something to say."""
    closed: list[str] = []
    process = partitions.process

    class App:
        async def stop(self) -> None:
            """It reads nothing any more."""

    async def nothing(*_: object) -> None:
        """Neither connects nor closes."""

    async def discard() -> None:
        closed.append("discarded")

    async def stop() -> None:
        closed.append("sent")

    async def stands() -> None:
        if lost:
            await asyncio.Event().wait()

    producer.stop, producer.discard = stop, discard  # type: ignore[attr-defined]  # of a fake
    process.outbox._lease_stands = stands
    member: Any = process.membership
    member.is_valid, member.leave = (lambda: not lost), nothing
    process.prefixes.stop = nothing  # type: ignore[method-assign]  # it never started
    tasks = [asyncio.create_task(each) for each in (process.outbox.run(), asyncio.Event().wait())]
    process.outbox.put(replicas().request("r1"))
    began_s = asyncio.get_running_loop().time()
    await lives._wind_up(partitions, App(), tasks)
    assert asyncio.get_running_loop().time() - began_s < 1
    await process.close()
    return closed
