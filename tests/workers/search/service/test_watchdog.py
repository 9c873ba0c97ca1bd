"""A consumer that died quietly ends the worker."""

import asyncio
import functools
from typing import Any

import pytest

from schemas.errors import BrokerUnavailable
from schemas.settings import LogSettings
from tests.waiting import until
from workers.search.service import watchdog
from workers.search.service.watchdog import STALL_MS, Progress


def test_a_consumer_that_reads_nothing_though_there_is_something_ends_the_worker() -> None:
    progress, place, other = Progress(), ("retrieval.decode", 0), ("retrieval.decode", 1)
    progress.look({place: 100}, {}, 0)
    progress.look({place: 100}, {}, 10 * STALL_MS)  # what was there before is not counted
    progress.look({place: 105}, {place: 103}, 10 * STALL_MS + 1)
    progress.look({place: 105}, {place: 104}, 11 * STALL_MS)  # slow, and alive
    with pytest.raises(BrokerUnavailable, match="1 retrievals to read"):
        progress.look({place: 105}, {place: 104}, 12 * STALL_MS + 1)
    progress.look({other: 7}, {}, 13 * STALL_MS)
    with pytest.raises(BrokerUnavailable, match="2 retrievals to read"):
        progress.look({other: 9}, {}, 14 * STALL_MS + 1)


async def test_a_rebalance_begins_the_count_of_what_was_read_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, end, looks = ("retrieval.decode", 0), 100, 0

    class Broker:
        def __init__(self, **_: Any) -> None:
            self.start = self.stop = functools.partial(asyncio.sleep, 0)

        async def end_offsets(self, places: list[Any]) -> dict[Any, int]:
            nonlocal looks
            looks += 1
            return dict.fromkeys(places, end)

    for name, value in (("AIOKafkaConsumer", Broker), ("STALL_MS", 5), ("_LOOK_S", 0.001)):
        monkeypatch.setattr(watchdog, name, value)
    owned, read = {place}, {place: 100}
    watching = asyncio.create_task(watchdog.watch(LogSettings(), lambda: owned, read))

    async def looked(times: int) -> None:
        before = looks
        await until(lambda: looks >= before + times or watching.done())

    await looked(3)
    end, read[place] = 150, 150
    await looked(20)
    owned = {place}  # assigned again, and nothing comes
    read.clear()
    await looked(50)
    assert not watching.done()
    end = 160
    with pytest.raises(BrokerUnavailable, match="10 retrievals to read"):
        await watching
