"""The protocol of lanes, which advance the searches in an engine's slots.

There are two backends: threads on cores (`core_lanes.py`) and one CUDA device (`cuda_lanes.py`).
Slots are numbered over all lanes: lane i has slots i * slots_each to (i + 1) * slots_each. One
thread, the owner's, calls all methods; only `close` waits.
"""

import contextlib
import os
from dataclasses import dataclass
from typing import Protocol

from workers.vector.index.plans import PreparedSearch


@dataclass(frozen=True, slots=True)
class LaneStats:
    """The work of lanes since their start, summed over all lanes."""

    extends: int  # steps of a lane, each of which advances all of its running slots
    places_used: int  # slots that were advanced, summed over extends
    busy_ms: float


def run_as_batch_job() -> None:
    """Make the calling lane's thread a batch job for the operating system: when it wakes, it does
    not preempt the event loop, for which it would wait next."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Lanes(Protocol):
    """The lanes of one backend. One method for each command and each report, so more than five."""

    backend: str  # cpu or cuda
    count: int
    slots_each: int
    dim_max: int  # values of a vector that it can search
    top_m_max: int  # entries of a routing list
    tasks_max: int  # rows that a slot can measure in one extend
    feeds: int  # feeds of links that run at once while no other search lacks a place
    feed_queries: int  # queries of such a feed, one after the other in one slot
    bell: int  # a file descriptor, readable while `collect_ended` has slots to return
    failure: BaseException | None  # the error that ended a lane; the bell rings then

    def start(self, slot: int, search: PreparedSearch) -> None:
        """Copy a search's row to a slot, and advance the slot until it ends."""

    def run(self, slot: int, search: PreparedSearch) -> None:
        """Advance a slot whose row is filled in, until it ends."""

    def tell(self, slot: int, kind: int) -> None:
        """Send a command of `lane_loop.py`: PARK pauses a slot that has not ended yet; RESUME
        continues it; END cancels it: it ends soon, DONE or FREE, and is its lane's until then.
        """

    def collect_ended(self) -> list[int]:
        """Return the slots that ended since the last call, in order per lane; resets the bell."""

    def ms_per_extend(self) -> float | None:
        """Return the mean time of an extend between the last two calls; None without an extend.

        Cores: of `collect_ended`; a CUDA device: of this method."""

    def stats(self) -> LaneStats:
        """Return the work of all lanes since their start."""

    def close(self) -> None:
        """End the lanes, within an extend or two; slots stay as they are. Call it once."""
