"""A consumer that reads nothing although there is something to read ends its router."""

import asyncio
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError

from schemas.errors import BrokerUnavailable
from streams.agents import watchdog
from streams.agents.app import TOPICS
from streams.config import RouterSettings
from tests.streams.agents.fakes import (
    LOG,
    router_with_partition,
)
from tests.virtual import virtual
from tests.waiting import pass_time, run


def test_a_consumer_that_reads_nothing_in_spite_of_lag_ends_the_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        class Asking:
            async def end_offsets(self, tps: list[Any]) -> dict[Any, int]:
                return dict.fromkeys(tps, 3)

            async def __aenter__(self) -> "Asking":
                return self

            async def __aexit__(self, *_: object) -> None:
                return None

        monkeypatch.setattr(watchdog, "asking_client", lambda log: Asking())
        partitions, _ = await router_with_partition()
        partitions.next_offsets = {(topic, 0): 3 for topic in TOPICS}
        settings = RouterSettings(stall_exit_ms=50)
        watch = asyncio.create_task(watchdog.watch_progress(LOG, settings, partitions))
        await asyncio.wait([watch], timeout=0.2)
        assert not watch.done()  # nothing to read
        partitions.next_offsets["requests", 0] = 1
        for _ in range(9):  # a rebuild, whose end is far away (issue 10, 5)
            partitions.records_read += 1
            await asyncio.wait([watch], timeout=0.02)
        assert not watch.done()
        with pytest.raises(BrokerUnavailable, match=r"2 records to read on partitions \[0\]"):
            await watch

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
    partitions, _ = await router_with_partition()
    settings = RouterSettings(stall_exit_ms=1_000)
    watch = asyncio.create_task(watchdog.watch_progress(LOG, settings, partitions))
    await pass_time(20)
    assert not watch.done()
    asking.away = False
    with pytest.raises(BrokerUnavailable, match="records to read"):
        await watch
