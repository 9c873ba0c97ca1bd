"""Configures Python's garbage collector in our processes to run rarely.

A collection stops the process for about 0.26 us per object that it examines, in the middle of other
work. Almost none of our objects form cycles, so young objects are examined seven times less often
than by default. This makes the collector's share of the time smaller and keeps each stop to
milliseconds. Objects made at the start are never examined: imports make a hundred thousand objects
and drop a thousand of them, and to find these would take a tenth of a start.
"""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (5_000, 5, 20)  # new objects; collections of the youngest generation, and of the next
_FROZEN_AFTER_S = (3, 60)  # the second is for engines, which start slowly


def defer_gc(loop: asyncio.AbstractEventLoop) -> None:
    """Keep the collector off until the first freeze; then it examines only later objects."""
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
