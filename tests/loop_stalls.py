"""Whether anything holds up the event loop, by this thread's processor time."""

import asyncio
import gc
import time
from collections.abc import Awaitable
from typing import Any

STALL_S = 0.2  # of processor time, so that a busy machine makes nothing longer


async def unstalled(work: Awaitable[Any]) -> Any:
    """The result of work that never held the event loop for long.

    Without the garbage collector, which looks through all that other tests have made.
    """
    gc.disable()
    try:
        before = time.thread_time()
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.sleep(0)
            now = time.thread_time()
            assert now - before < STALL_S, f"the event loop stood still for {now - before:.3f} s"
            before = now
        return task.result()
    finally:
        gc.enable()
