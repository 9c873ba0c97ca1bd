"""Virtual time: calls in order of their time, and of their making where times are equal.

A process may sleep, and its wall clock may be wrong: that is for faults.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf, nextafter


class Alarm:
    """A call that is due at a time; None once it is cancelled."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """It is not to be made, and time does not stop for it."""
        self.call = None


class Clock:
    """`now_ms` stands still while a call runs and jumps to the next one after it."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._due: list[tuple[float, int, Alarm]] = []
        self._seq = 0

    def at(self, at_ms: float, call: Callable[[], None]) -> Alarm:
        """Run a call at a time, at once where that has passed."""
        alarm = Alarm(call)
        self._seq += 1
        heappush(self._due, (at_ms if at_ms > self.now_ms else self.now_ms, self._seq, alarm))
        return alarm

    def after(self, delay_ms: float, call: Callable[[], None]) -> Alarm:
        """Run a call after a delay."""
        return self.at(self.now_ms + delay_ms, call)

    def step(self) -> bool:
        """Run the next call; False where none is left."""
        while self._due:
            at_ms, _, alarm = heappop(self._due)
            if alarm.call is not None:
                self.now_ms = at_ms
                alarm.call()
                return True
        return False

    def defers(self, call: Callable[[], None]) -> bool:
        """Whether the process sleeps, and makes the call when it wakes."""
        return False


class ProcessClock(Clock):
    """What happens in one process; all of it waits while that sleeps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asleep: list[Alarm] | None = None  # what is to be done when it wakes

    @property
    def now_ms(self) -> float:  # type: ignore[override]  # it has no time of its own
        return self._clock.now_ms

    def at(self, at_ms: float, call: Callable[[], None]) -> Alarm:
        """Run a call at a time, or when it wakes."""
        alarm = Alarm(call)
        self._clock.at(at_ms, lambda: self._ring(alarm))
        return alarm

    def _ring(self, alarm: Alarm) -> None:
        if self._asleep is not None:
            self._asleep.append(alarm)
        elif alarm.call is not None:
            alarm.call()

    @property
    def is_asleep(self) -> bool:
        return self._asleep is not None

    def defers(self, call: Callable[[], None]) -> bool:
        """Whether the process sleeps, and makes the call when it wakes."""
        if self._asleep is None:
            return False
        self._asleep.append(Alarm(call))
        return True

    def sleep(self) -> None:
        """Nothing happens from now on."""
        self._asleep = self._asleep or []

    def wake(self) -> None:
        """What should have happened meanwhile happens now, in order."""
        late, self._asleep = self._asleep or [], None
        for alarm in late:
            self._ring(alarm)

    def end(self) -> None:
        """The process is gone, and another comes."""
        self._asleep = None


class WallClock(Clock):
    """What a process takes for the time of day; `ahead_ms` is what it is wrong by."""

    def __init__(self, process: ProcessClock) -> None:
        self._process = process
        self.ahead_ms = 0.0

    @property
    def now_ms(self) -> float:  # type: ignore[override]  # it has no time of its own
        return self._process.now_ms + self.ahead_ms

    def at(self, at_ms: float, call: Callable[[], None]) -> Alarm:
        """Run a call at a time of this clock, and never before it."""
        due_ms = at_ms - self.ahead_ms
        while due_ms + self.ahead_ms < at_ms:  # it was rounded: who wakes would wait again
            due_ms = nextafter(due_ms, inf)
        return self._process.at(due_ms, call)

    def defers(self, call: Callable[[], None]) -> bool:
        """Whether the process sleeps, and makes the call when it wakes."""
        return self._process.defers(call)
