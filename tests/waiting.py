"""How tests run and wait: one deadline per test, and conditions instead of sleeps."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
_POLL_S = 0.01


def run(main: Coroutine[Any, Any, Result], *, seconds: float = 90) -> Result:
    """Run a test's coroutine; TimeoutError when it takes longer."""

    async def limited() -> Result:
        async with asyncio.timeout(seconds):
            return await main

    return asyncio.run(limited())


async def until(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]], *, seconds: float = 60
) -> None:
    """Wait until the condition, plain or async, is true; TimeoutError when it never is."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if isinstance(found, Awaitable):
                found = await found
            if found:
                return
            await asyncio.sleep(_POLL_S)  # the one place that polls; tests call this


async def pass_time(seconds: float) -> None:
    """Let time pass where time itself is under test: virtual, or between a stress test's events."""
    await asyncio.sleep(seconds)
