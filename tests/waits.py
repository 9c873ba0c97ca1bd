"""How tests run and wait: one deadline per test, and conditions instead of sleeps.

Bounds are there for what hangs, and for nothing else: a machine may stall for 20 s, and may be
five times slower than the one that a test was written on.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from tests.virtual_time import VirtualLoop

Result = TypeVar("Result")
PATIENCE_S = 100.0  # for what takes moments; pytest ends most tests after 900 s
START_S = 600.0  # for processes that start, or a load that goes on while they do
_POLL_S = 0.01


def run(main: Coroutine[Any, Any, Result], *, seconds: float = PATIENCE_S) -> Result:
    """Run a test's coroutine; TimeoutError when it takes longer."""

    async def limited() -> Result:
        async with asyncio.timeout(seconds):
            return await main

    return asyncio.run(limited())


@contextlib.asynccontextmanager
async def meanwhile(work: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Run work beside a block, cancel it at the end, and ignore its outcome."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]], *, seconds: float = PATIENCE_S
) -> None:
    """Wait until the condition, plain or async, is true; TimeoutError when it never is."""
    async with asyncio.timeout(seconds):
        while True:
            outcome = condition()
            if isinstance(outcome, Awaitable):
                outcome = await outcome
            if outcome:
                return
            await asyncio.sleep(_POLL_S)  # the one place that polls; tests call this


async def pass_time(seconds: float) -> None:
    """Let time pass, which has to be virtual."""
    assert isinstance(asyncio.get_running_loop(), VirtualLoop), "wait for a condition"
    await asyncio.sleep(seconds)


async def pause(seconds: float) -> None:
    """Pause between two calls to real processes; `test_tidy.py` lists the files that may."""
    await asyncio.sleep(seconds)
