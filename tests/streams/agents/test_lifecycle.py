"""How a router's life ends: what it had decided leaves, unless it is no longer its to say."""

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any

from streams.agents import lifecycle
from streams.agents.partitions import OwnedPartitions
from tests.streams.agents.fakes import FakeProducer, router_with_partition
from tests.streams.core.router_setups import replicas
from tests.virtual import virtual


@virtual
async def test_a_router_whose_lease_is_lost_leaves_without_a_word() -> None:
    """It waited for what would never leave, and then flushed what it had buffered."""
    for lost, expected in ((True, "discarded"), (False, "sent")):
        partitions, producer = await router_with_partition()
        assert await wound_up(partitions, producer, lost=lost) == [expected]
        said = {topic for topic, *_ in producer.sent}
        assert said == (set() if lost else {"decisions", "decode", "journal"})


@virtual
async def test_a_router_joins_again_though_libraries_lose_cancellations() -> None:
    """After an outage one waited for ever: its consumer's stop had lost the bound."""

    async def deaf() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    class DeafApp(App):
        async def stop(self) -> None:
            await deaf()

    partitions, producer = await router_with_partition()
    closed = await wound_up(
        partitions, producer, lost=True, app=DeafApp(), others=[deaf()], within_s=30
    )
    assert closed == ["discarded"]


class App:
    """It reads nothing any more."""

    async def stop(self) -> None:
        """At once."""


async def wound_up(
    partitions: OwnedPartitions,
    producer: FakeProducer,
    *,
    lost: bool,
    app: Any = None,
    others: Sequence[Coroutine[Any, Any, None]] = (),
    within_s: float = 1,
) -> list[str]:
    """How the producer is closed when the router winds up with something to say."""
    closed: list[str] = []
    process = partitions.process

    async def nothing(*_: object) -> None:
        """Neither connects nor closes."""

    async def discard() -> None:
        closed.append("discarded")

    async def stop() -> None:
        closed.append("sent")

    async def wait_for_lease() -> None:
        if lost:
            await asyncio.Event().wait()

    producer.stop, producer.discard = stop, discard  # type: ignore[attr-defined]  # of a fake
    process.outbox._wait_for_lease = wait_for_lease
    member: Any = process.membership
    member.is_valid, member.leave = (lambda: not lost), nothing
    process.prefixes.stop = nothing  # type: ignore[method-assign]  # it never started
    loops: list[Any] = [process.outbox.run(), asyncio.Event().wait(), *others]
    tasks = [asyncio.create_task(each) for each in loops]
    process.outbox.put(replicas().request("r1"))
    began_s = asyncio.get_running_loop().time()
    await lifecycle._shut_down(partitions, app or App(), tasks)
    assert asyncio.get_running_loop().time() - began_s < within_s
    await process.close()
    return closed
