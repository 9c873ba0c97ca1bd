"""What an engine asks of lanes: they advance the searches that are in its slots.

Two backends: threads on cores (`core_lanes.py`) and one CUDA device (`cuda_lanes.py`). Slot numbers
run through all lanes: lane i has slots i * slots_each to (i + 1) * slots_each. All methods are for
one thread, the owner's, and none of them waits but `close`.
"""

import contextlib
import os
from dataclasses import dataclass
from typing import Protocol

from workers.search.index.plans import PreparedSearch


@dataclass(frozen=True, slots=True)
class LaneStats:
    """What lanes have done since their start, summed over them."""

    extends: int  # of all slots of a lane together
    places_used: int  # slots that took part, summed over extends
    busy_ms: float


def run_as_batch_job() -> None:
    """For a lane's thread: to the operating system it is a batch job. When it wakes it does not
    push aside the event loop, which it would wait for next."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Lanes(Protocol):
    """More than five methods: one for each thing that is told to a lane, or heard of it."""

    backend: str  # cpu or cuda
    count: int
    slots_each: int
    dim_max: int  # values of a vector that it can search
    top_m_max: int  # entries of a routing list
    tasks_max: int  # rows that a slot can measure in one extend
    feeds: int  # of links, that run at a time where nobody else lacks a place
    feed_queries: int  # that such a feed has, one after the other in one slot
    bell: int  # a file descriptor, readable while slots ended that `ended` has not returned
    failure: BaseException | None  # what ended a lane; the bell rings then

    def start(self, slot: int, search: PreparedSearch) -> None:
        """Fill in a slot's row with a search's, and advance it until it ends."""

    def run(self, slot: int, search: PreparedSearch) -> None:
        """Advance a slot whose row is filled in, until it ends."""

    def tell(self, slot: int, kind: int) -> None:
        """Of `lane_loop.py`: PARK leaves a slot out, if it has not ended yet; RESUME advances it
        again; END gives it up, and it ends soon, done or free, and is its lane's until then.
        """

    def collect_ended(self) -> list[int]:
        """Slots that ended since the last call, in order of each lane; the bell is silent then."""

    def ms_per_extend(self) -> float | None:
        """Of what was done between the last two calls of `ended`; None if nothing was."""

    def stats(self) -> LaneStats:
        """Return the work of all lanes since their start."""

    def close(self) -> None:
        """End the lanes, within an extend or two; slots stay as they are. Once."""
