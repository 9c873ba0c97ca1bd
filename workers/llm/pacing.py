"""When frames leave: the rules of a worker's sending, without clock and log.

A partition's next frame leaves only when its last one is in the log. What a client notices at once
leaves at once; the later tokens of many streams wait for an interval, and what is urgent meanwhile
leaves alone. `workers/loops.py` sends what `take` returns, and so does the simulator.
"""

from dataclasses import dataclass
from enum import Enum

from workers.llm.frames import Frames, OutgoingFrame

_INTERVAL_STREAMS = 64  # so many share frames at the shortest interval


class Due(Enum):
    """Which of the pending frames may leave now."""

    ALL = "all"
    URGENT = "urgent"  # while later tokens wait for their interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Between two frames of many streams, in ms; `at_once_max` streams or fewer never wait."""

    shortest_ms: float
    longest_ms: float
    at_once_max: int


class Pacing:
    """Which frames are due; `alarm_ms` is when to ask again, None while nothing waits for time."""

    def __init__(self, frames: Frames, intervals: Intervals) -> None:
        self.alarm_ms: float | None = None
        self._frames = frames
        self._intervals = intervals
        self._next_ms = 0.0  # when the next frame of many streams may leave
        self._unacknowledged: set[int] = set()  # gateway partitions of whose last frame it is so

    @property
    def is_settled(self) -> bool:
        """Everything is in the log."""
        return not self._unacknowledged and not self._frames.pending()

    def due(self, now_ms: float, request_count: int, *, at_once: bool = False) -> Due | None:
        """What `take` may be asked for, `held` requests being on this worker; None: nothing. With
        `at_once` nothing waits for the interval.
        """
        if not self._frames.pending(self._unacknowledged):
            return None
        if at_once or not self._may_wait(now_ms, request_count):
            return Due.ALL
        return Due.URGENT if self._frames.urgent else None

    def take(self, due: Due, stamp_ms: int) -> list[OutgoingFrame]:
        """Frames with that time stamp, to be sent in this order."""
        urgent_only = due is Due.URGENT
        batches = self._frames.take(stamp_ms, self._unacknowledged, urgent_only=urgent_only)
        self._unacknowledged.update([batch.partition for batch in batches])
        return batches

    def mark_acknowledged(self, partition: int) -> None:
        """The partition's last frame is in the log."""
        self._unacknowledged.discard(partition)

    def _may_wait(self, now_ms: float, request_count: int) -> bool:
        """Whether later tokens of many streams are pending, too soon after their last frame.

        The more streams, the longer they wait: their cost per token falls with every one that joins
        a frame, and what beginnings and ends then find free is their latency.
        """
        intervals = self._intervals
        if now_ms < self._next_ms and self._frames.streams > intervals.at_once_max:
            self.alarm_ms = self._next_ms
            return True
        longer = max(1.0, request_count / _INTERVAL_STREAMS)
        longest_ms = max(intervals.shortest_ms, intervals.longest_ms)
        self._next_ms = now_ms + min(intervals.shortest_ms * longer, longest_ms)
        return False
