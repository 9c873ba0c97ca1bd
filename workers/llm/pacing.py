"""Decides when frames leave, without clock and log.

A partition's next frame leaves only when its last one is in the log. Urgent parts leave at once.
The later tokens of many streams wait for an interval. `workers/loops.py` and the simulator send the
frames that `take` returns.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from workers.llm.frames import Frames, OutgoingFrame

_INTERVAL_STREAMS = 64  # with this many requests or fewer, the interval is the shortest


class Due(Enum):
    """Which of the pending frames may leave now."""

    ALL = "all"
    URGENT = "urgent"  # while later tokens wait for their interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Intervals between frames of many streams, in ms; `at_once_max` streams never wait."""

    shortest_ms: float
    longest_ms: float
    at_once_max: int


# Few streams have no delay; many have 50 to 30 updates a second, which a reader sees as steady.
INTERVALS: Final = Intervals(shortest_ms=20, longest_ms=32, at_once_max=16)


class Pacing:
    """Decides which frames are due; `alarm_ms` is when to call `due` again, None if not needed."""

    def __init__(self, frames: Frames, intervals: Intervals) -> None:
        self.alarm_ms: float | None = None
        self._frames = frames
        self._intervals = intervals
        self._next_ms = 0.0  # when the next frame of many streams may leave
        self._unacknowledged: set[int] = set()  # gateway partitions with a frame in flight

    @property
    def is_settled(self) -> bool:
        """Return whether all frames are in the log."""
        return not self._unacknowledged and not self._frames.pending()

    def due(self, now_ms: float, request_count: int, *, at_once: bool = False) -> Due | None:
        """Return which frames are due, for `take`; None if there are none. `request_count` is the
        number of active requests. With `at_once`, no frame waits for the interval.
        """
        if not self._frames.pending(self._unacknowledged):
            return None
        if at_once or not self._may_wait(now_ms, request_count):
            return Due.ALL
        return Due.URGENT if self._frames.urgent else None

    def take(self, due: Due, stamp_ms: int) -> list[OutgoingFrame]:
        """Return the frames to send, in order, with this time stamp."""
        urgent_only = due is Due.URGENT
        batches = self._frames.take(stamp_ms, self._unacknowledged, urgent_only=urgent_only)
        self._unacknowledged.update([batch.partition for batch in batches])
        return batches

    def mark_acknowledged(self, partition: int) -> None:
        """Note that the partition's last frame is in the log."""
        self._unacknowledged.discard(partition)

    def _may_wait(self, now_ms: float, request_count: int) -> bool:
        """Return whether the tokens of many streams must wait for the interval.

        The interval grows with the number of streams: the cost per token falls with every stream
        that shares a frame, which leaves time for first tokens and ends.
        """
        intervals = self._intervals
        if now_ms < self._next_ms and self._frames.streams > intervals.at_once_max:
            self.alarm_ms = self._next_ms
            return True
        longer = max(1.0, request_count / _INTERVAL_STREAMS)
        longest_ms = max(intervals.shortest_ms, intervals.longest_ms)
        self._next_ms = now_ms + min(intervals.shortest_ms * longer, longest_ms)
        return False
