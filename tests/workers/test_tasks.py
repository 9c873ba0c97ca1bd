"""Tasks that live as long as a worker: the end of one is noticed; a stop ends what is under way."""

import asyncio

import pytest

from schemas.errors import ConfigError, EngineDead
from workers import tasks


async def never() -> None:
    await asyncio.Event().wait()


async def soon(value: str = "") -> str:
    await asyncio.sleep(0)
    return value


async def ends() -> None:
    await soon()


async def fails() -> None:
    raise ConfigError("no")


async def test_work_that_is_done_before_the_stop_counts() -> None:
    stop, done = asyncio.Event(), []

    async def work() -> None:
        done.append(await soon("done"))

    assert await tasks.run_unless(stop, work()) is True and done == ["done"]
    with pytest.raises(ConfigError):
        await tasks.run_unless(stop, fails())


async def test_a_stop_ends_work_that_is_under_way() -> None:
    stop, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            stop.set()
            await never()
        finally:
            ended.set()

    assert await tasks.run_unless(stop, work()) is False and ended.is_set()


async def test_whoever_waits_takes_the_work_along() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            begun.set()
            await never()
        finally:
            ended.set()

    waiting = asyncio.create_task(tasks.run_unless(asyncio.Event(), work()))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()


async def test_a_task_that_ends_is_noticed_by_who_waits_for_something_else() -> None:
    for work, error in ((fails, ConfigError), (ends, EngineDead)):
        held = tasks.Tasks()
        held.spawn("steady", never())
        held.spawn("other", work())
        with pytest.raises(error):
            await held.until(never())
        await held.cancel()


async def test_only_named_tasks_count_where_some_are_named() -> None:
    held = tasks.Tasks()
    held.spawn("over", ends())
    held.spawn("watched", never())
    assert await held.until(soon("goal"), ["watched"]) == "goal"
    await held.cancel()


async def test_closing_goes_on_after_a_failure_and_after_its_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await tasks.close("one", fails(), 1_000)
    await tasks.close("other", never(), 1)
    assert [record.args for record in caplog.records] == [("one",), ("other",)]
