"""How a router's life ends: what it had decided leaves, unless it is no longer its to say."""

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any

from streams.agents import lifecycle
from streams.agents.partitions import OwnedPartitions
from tests.streams.agents.fakes import FakeProducer, router_with_partition
from tests.streams.core.router_setups import replicas
from tests.virtual_time import virtual


@virtual
async def test_router_with_lost_lease_discards_pending_records() -> None:
    """A shutdown after a lost lease once waited for sends that could not leave."""
    for lease_lost, expected in ((True, "discarded"), (False, "sent")):
        partitions, producer = await router_with_partition()
        assert await wound_up(partitions, producer, lease_lost=lease_lost) == [expected]
        topics = {topic for topic, *_ in producer.sends}
        assert topics == (set() if lease_lost else {"decisions", "decode", "journal"})


@virtual
async def test_router_shuts_down_though_libraries_lose_cancellations() -> None:
    """After an outage a router waited for ever: its consumer's stop had lost the bound."""

    async def deaf() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    class DeafApp(App):
        async def stop(self) -> None:
            await deaf()

    partitions, producer = await router_with_partition()
    closed = await wound_up(
        partitions, producer, lease_lost=True, app=DeafApp(), coroutines=[deaf()], within_s=30
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
    lease_lost: bool,
    app: Any = None,
    coroutines: Sequence[Coroutine[Any, Any, None]] = (),
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
        if lease_lost:
            await asyncio.Event().wait()

    producer.stop, producer.discard = stop, discard  # type: ignore[attr-defined]  # of a fake
    process.outbox._wait_for_lease = wait_for_lease
    member: Any = process.membership
    member.is_valid, member.leave = (lambda: not lease_lost), nothing
    process.prefixes.stop = nothing  # type: ignore[method-assign]  # it never started
    loops: list[Any] = [process.outbox.run(), asyncio.Event().wait(), *coroutines]
    tasks = [asyncio.create_task(loop) for loop in loops]
    process.outbox.put(replicas().request("r1"))
    began_s = asyncio.get_running_loop().time()
    await lifecycle._shut_down(partitions, app or App(), tasks)
    assert asyncio.get_running_loop().time() - began_s < within_s
    await process.close()
    return closed
