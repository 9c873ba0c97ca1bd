"""The watchdog: a consumer that reads nothing although there is something to read ends its life."""

import asyncio
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError

from schemas.errors import BrokerUnavailable
from schemas.settings import LogSettings
from streams.log.faust import watchdog
from streams.log.faust.group import Group
from streams.log.faust.watchdog import ReadProgress
from tests.virtual_time import virtual
from tests.waits import pass_time

PLACE = ("requests", 0)
STALL_MS = 1_000


async def group_at(offset: int | None) -> tuple[Group, ReadProgress]:
    group = Group()
    group.on_assigned({PLACE})
    if offset is not None:
        group.next_offsets[PLACE] = offset
    return group, ReadProgress(group, STALL_MS)


async def test_watchdog_ends_session_on_lag_without_progress() -> None:
    _, progress = await group_at(3)
    for now_ms in range(0, 9_000, 500):
        progress.check({PLACE: 3}, now_ms)  # nothing to read
    progress.check({PLACE: 5}, 9_500)
    with pytest.raises(BrokerUnavailable, match=r"2 records to read of .*requests.* restart it"):
        progress.check({PLACE: 5}, 10_600)


async def test_watchdog_counts_any_read_record_as_progress() -> None:
    """A rebuild makes progress, too, although its end is far away."""
    group, progress = await group_at(0)
    for now_ms in range(0, 9_000, 900):
        group.records_read += 1
        progress.check({PLACE: 5}, now_ms)
    progress.check({PLACE: 5}, 9_000)
    with pytest.raises(BrokerUnavailable, match="5 records"):
        progress.check({PLACE: 5}, 9_200)


async def test_watchdog_counts_only_new_records_of_unread_partition() -> None:
    _, progress = await group_at(None)
    for now_ms in range(0, 9_000, 500):
        progress.check({PLACE: 100}, now_ms)
    progress.check({PLACE: 110}, 9_000)
    with pytest.raises(BrokerUnavailable, match="10 records"):
        progress.check({PLACE: 110}, 9_600)


async def test_watchdog_restarts_count_after_rebalance() -> None:
    """Other members may have read records meanwhile, so earlier offsets do not count."""
    group, progress = await group_at(100)
    progress.check({PLACE: 100}, 0)
    group.records_read += 50
    group.next_offsets[PLACE] = 150
    progress.check({PLACE: 150}, 500)
    group.on_revoked()
    group.on_assigned({PLACE})
    for now_ms in range(1_000, 9_000, 500):
        progress.check({PLACE: 150}, now_ms)
    progress.check({PLACE: 160}, 9_000)
    with pytest.raises(BrokerUnavailable, match="10 records to read"):
        progress.check({PLACE: 160}, 9_600)


@virtual
async def test_watchdog_ignores_broker_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage may last; a consumer that stands still after it fails."""

    class Asking:
        away = True

        async def __aenter__(self) -> "Asking":
            return self

        async def __aexit__(self, *_: object) -> None:
            """Closed."""

        async def end_offsets(self, places: list[Any]) -> dict[Any, int]:
            assert [tp.topic for tp in places] == ["test.requests"]
            if self.away:
                raise KafkaConnectionError("nobody answers")
            return dict.fromkeys(places, 3)

    asking = Asking()
    monkeypatch.setattr(watchdog, "query_client", lambda log: asking)
    group, _ = await group_at(0)
    watching = asyncio.create_task(
        watchdog.watch(LogSettings(topic_prefix="test."), group, STALL_MS)
    )
    asking.away = False
    await pass_time(0.3)  # one look: there is something to read
    asking.away = True
    await pass_time(20)
    asking.away = False
    await pass_time(0.5)  # less than the consumer has after the outage
    assert not watching.done()
    with pytest.raises(BrokerUnavailable, match="3 records to read"):
        await watching
