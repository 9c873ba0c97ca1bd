"""How Python's collector of cyclic garbage runs in our processes: seldom.

A collection stops the process for about 0.26 us per object that it looks at, in the middle of
whatever is under way. Almost nothing of ours is cyclic, so young objects are looked at seven times
less often than by default, which makes the collector's share of the time smaller and keeps one
stop to milliseconds. What was built at the start is never looked at: imports make a hundred
thousand objects and drop a thousand of them, and to look for these would be a tenth of a start.
"""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (5_000, 5, 20)  # new objects; collections of the youngest, and of the next
_FROZEN_AFTER_S = (3, 60)  # the second is for engines, which start slowly


def defer_gc(loop: asyncio.AbstractEventLoop) -> None:
    """Keep the collector off until the first freeze; then it looks only at what came later."""
    gc.disable()
    gc.set_threshold(*THRESHOLDS)
    for delay_s in _FROZEN_AFTER_S:
        loop.call_later(delay_s, gc.freeze)  # else a full collection takes tens of milliseconds
    loop.call_later(_FROZEN_AFTER_S[0], gc.enable)


@contextmanager
def deferred_gc() -> Iterator[None]:
    """Run as after `defer_gc`: for benchmarks of what runs in such processes."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
