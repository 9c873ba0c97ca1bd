"""Runs tasks that must not end while a worker serves, and closes parts without raising errors.

Called by `workers/runtime.py` and `workers/serving.py`.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Final, TypeVar

from schemas.errors import EngineDead
from streams.log.cancellation import cancel_and_wait, run_within

log = logging.getLogger("trivium.worker")
Result = TypeVar("Result")
CLOSE_MS: Final = 10_000  # for one part of a worker to close; within the 40 s of `trivium down`


class Tasks:
    """Named tasks that run while the worker serves; if one ends, that is a failure."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wakeup = asyncio.Event()  # a task has ended, or the goal of `until`

    @property
    def names(self) -> list[str]:
        """Return the names of all spawned tasks."""
        return list(self._tasks)

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Start a task under a name."""
        task = self._tasks[name] = asyncio.create_task(work, name=name)
        task.add_done_callback(lambda _: self._wakeup.set())

    async def until(self, goal: Coroutine[Any, Any, Result], names: Sequence[str] = ()) -> Result:
        """Await the goal; raise the error of a task that ends before it, or EngineDead.

        With `names`, only these tasks count. Tasks that start meanwhile count as well.
        """
        aim = asyncio.create_task(goal)
        aim.add_done_callback(lambda _: self._wakeup.set())
        try:
            while True:
                self._wakeup.clear()
                for name, task in self._tasks.items():
                    if task.done() and (not names or name in names):
                        task.result()
                        raise EngineDead(f"the task {name!r} ended unexpectedly")
                if aim.done():
                    return aim.result()
                await self._wakeup.wait()
        finally:
            await cancel_and_wait(aim)

    async def watch(self) -> None:
        """Wait until cancelled; raise the error of a task that ends."""
        await self.until(asyncio.Event().wait())

    async def cancel(self) -> None:
        """Cancel all tasks and wait for them."""
        await cancel_and_wait(*self._tasks.values())


async def run_unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Return whether the work finished before `stop` was set; if not, it is cancelled.

    Errors of the work are raised.
    """
    working, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(working, stopped)
    if working.cancelled():
        return False
    working.result()
    return True


async def close(what: str, closing: Coroutine[Any, Any, None], timeout_ms: int = CLOSE_MS) -> None:
    """Close one part within `timeout_ms`, and log its failure, so that others are closed too."""
    try:
        if not await run_within(timeout_ms / 1000, closing):
            log.error("closing the %s takes too long; it is left", what)
    except Exception:
        log.exception("closing the %s failed", what)
