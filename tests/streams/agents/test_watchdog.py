"""A router's life at its end, and what it knows of other lives; no broker."""

import asyncio
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError

from schemas.errors import BrokerUnavailable
from schemas.records import Role
from streams.agents import lives as running
from streams.agents import watchdog
from streams.agents.router import RouterProcess
from streams.config import RouterSettings
from tests.streams import builders
from tests.streams.agents.fakes import LOG, FakeProducer, process_with_partition
from tests.streams.builders import T0
from tests.streams.core.router_setups import replicas
from tests.virtual import virtual
from tests.waiting import pass_time, run


def test_measured_clocks_reach_placement() -> None:
    """What heartbeats tell of a member's clock, and not of its next life's (issue 10, 10)."""

    async def main() -> None:
        process, _ = await process_with_partition()
        view, known = process.membership.view, process.router.tables.fleet.view.members

        def told(record: Any, logged_ms: int) -> None:
            view.apply(record, 0, T0, logged_ms)
            process._fleet_record(record, 0, T0)

        told(builders.registration("d0", Role.DECODE), T0)
        told(builders.beat("d0", 1, at_ms=T0 + 400), T0 + 10)
        assert known["d0"].ahead_ms == 390
        told(builders.registration("d0", Role.DECODE, epoch=9), T0 + 20)
        assert known["d0"].ahead_ms == 0

    run(main())


@virtual
async def test_a_broker_that_is_away_is_no_stuck_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is; what stands still afterwards is one (issue 10, 4)."""

    class Asking:
        away = True

        async def __aenter__(self) -> "Asking":
            return self

        async def __aexit__(self, *_: object) -> None:
            """Closed."""

        async def end_offsets(self, places: list[Any]) -> dict[Any, int]:
            if self.away:
                raise KafkaConnectionError("nobody answers")
            return dict.fromkeys(places, 3)

    asking = Asking()
    monkeypatch.setattr(watchdog, "asking_client", lambda log: asking)
    process, _ = await process_with_partition()
    settings = RouterSettings(stall_exit_ms=1_000)
    watch = asyncio.create_task(watchdog.watch_progress(LOG, settings, process))
    await pass_time(20)
    assert not watch.done()
    asking.away = False
    with pytest.raises(BrokerUnavailable, match="records to read"):
        await watch


@virtual
async def test_a_router_whose_lease_is_lost_leaves_without_a_word() -> None:
    """It waited for what would never leave, and then flushed what it had buffered (issue 10, 9)."""
    for lost, expected in ((True, "discarded"), (False, "sent")):
        process, producer = await process_with_partition()
        assert await wound_up(process, producer, lost=lost) == [expected]
        said = {topic for topic, *_ in producer.sent}
        assert said == (set() if lost else {"decisions", "decode", "journal"})


async def wound_up(process: RouterProcess, producer: FakeProducer, *, lost: bool) -> list[str]:
    """How the producer is closed when the router winds up with something to say."""
    closed: list[str] = []

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
    process.outbox._stands = stands
    member: Any = process.membership
    member.is_valid, member.leave = (lambda: not lost), nothing
    process.prefixes.stop = nothing  # type: ignore[method-assign]  # it never started
    tasks = [asyncio.create_task(each) for each in (process.outbox.run(), asyncio.Event().wait())]
    process.outbox.put(replicas().request("r1"))
    began_s = asyncio.get_running_loop().time()
    await running._wind_up(process, App(), tasks)
    assert asyncio.get_running_loop().time() - began_s < 1
    await process.leave()
    return closed
