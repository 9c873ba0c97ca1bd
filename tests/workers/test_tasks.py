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


async def test_run_unless_counts_work_finished_before_stop() -> None:
    stop, results = asyncio.Event(), []

    async def work() -> None:
        results.append(await soon("done"))

    assert await tasks.run_unless(stop, work()) is True and results == ["done"]
    with pytest.raises(ConfigError):
        await tasks.run_unless(stop, fails())


async def test_run_unless_cancels_work_at_stop() -> None:
    stop, end_event = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            stop.set()
            await never()
        finally:
            end_event.set()

    assert await tasks.run_unless(stop, work()) is False and end_event.is_set()


async def test_run_unless_cancels_work_with_caller() -> None:
    start_event, end_event = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            start_event.set()
            await never()
        finally:
            end_event.set()

    waiting = asyncio.create_task(tasks.run_unless(asyncio.Event(), work()))
    await start_event.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert end_event.is_set()


async def test_tasks_until_raises_when_task_ends() -> None:
    for work, error in ((fails, ConfigError), (ends, EngineDead)):
        worker_tasks = tasks.Tasks()
        worker_tasks.spawn("steady", never())
        worker_tasks.spawn("other", work())
        with pytest.raises(error):
            await worker_tasks.until(never())
        await worker_tasks.cancel()


async def test_tasks_until_watches_only_named_tasks() -> None:
    worker_tasks = tasks.Tasks()
    worker_tasks.spawn("over", ends())
    worker_tasks.spawn("watched", never())
    assert await worker_tasks.until(soon("goal"), ["watched"]) == "goal"
    await worker_tasks.cancel()


async def test_close_continues_after_failure_and_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await tasks.close("one", fails(), 1_000)
    await tasks.close("other", never(), 1)
    assert [record.args for record in caplog.records] == [("one",), ("other",)]
