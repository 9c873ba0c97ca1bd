"""The wall clock of all processes; pure code takes the time as an argument instead.

Durations are differences of this time, so it runs with the monotonic clock. It follows the host's
wall clock: small differences slowly, without going backwards, and larger ones in one step, once
they have lasted. A wall clock that jumps for a second has no effect.
"""

import time
from collections.abc import Callable
from functools import partial

EXACT_MS = 1  # smaller differences are ignored
SLEWED_MS = 500  # up to this difference, the clock is slewed
SLEW = 0.05  # largest change of speed while it is slewed
LASTING_MS = 10_000  # a larger difference is stepped after this time
_MS_NS = 1_000_000


class SteadyClock:
    """Wall time without jumps; only frequent calls detect that a jump is over."""

    def __init__(self, wall_ns: Callable[[], int], steady_ns: Callable[[], int]) -> None:
        self._wall_ns, self._steady_ns = wall_ns, steady_ns
        self._asked_ns = steady_ns()
        self._offset_ns = wall_ns() - self._asked_ns
        self._differs_since_ns: int | None = None

    def ms(self) -> int:
        """Return the milliseconds since the epoch."""
        now_ns = self._steady_ns()
        off_ns = self._wall_ns() - now_ns - self._offset_ns
        if -EXACT_MS * _MS_NS < off_ns < EXACT_MS * _MS_NS:
            self._differs_since_ns = None
        else:
            self._follow(off_ns, now_ns)
        self._asked_ns = now_ns
        return (now_ns + self._offset_ns) // _MS_NS

    def _follow(self, off_ns: int, now_ns: int) -> None:
        if abs(off_ns) <= SLEWED_MS * _MS_NS:
            most_ns = int((now_ns - self._asked_ns) * SLEW)
            self._offset_ns += max(-most_ns, min(off_ns, most_ns))
            self._differs_since_ns = None
        elif self._differs_since_ns is None:
            self._differs_since_ns = now_ns
        elif now_ns - self._differs_since_ns >= LASTING_MS * _MS_NS:
            self._offset_ns += off_ns
            self._differs_since_ns = None


# A monotonic clock, if possible one that also runs while the machine sleeps.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_CLOCK = SteadyClock(time.time_ns, partial(time.clock_gettime_ns, _STEADY))


def wall_ms() -> int:
    """Return the wall time in milliseconds since the epoch; durations are differences of it."""
    return _CLOCK.ms()
