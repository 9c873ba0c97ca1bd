"""Virtual time: calls run in order of time, and of scheduling if times are equal.

Faults make a process sleep or its wall clock wrong: see `ProcessClock` and `WallClock`.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf, nextafter


class Alarm:
    """A call that is due at a time; `call` is None once the alarm is cancelled."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Cancel the call; the clock does not stop at its time."""
        self.call = None


class Clock:
    """A clock whose `now_ms` stands still during a call and then jumps to the next one."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._due: list[tuple[float, int, Alarm]] = []
        self._seq = 0

    def at(self, at_ms: float, call: Callable[[], None]) -> Alarm:
        """Run a call at a time, or at once if that has passed."""
        alarm = Alarm(call)
        self._seq += 1
        heappush(self._due, (at_ms if at_ms > self.now_ms else self.now_ms, self._seq, alarm))
        return alarm

    def after(self, delay_ms: float, call: Callable[[], None]) -> Alarm:
        """Run a call after a delay."""
        return self.at(self.now_ms + delay_ms, call)

    def step(self) -> bool:
        """Run the next call; return False if none is left."""
        while self._due:
            at_ms, _, alarm = heappop(self._due)
            if alarm.call is not None:
                self.now_ms = at_ms
                alarm.call()
                return True
        return False

    def defers(self, call: Callable[[], None]) -> bool:
        """Return whether the process sleeps; if so, the call is made when it wakes."""
        return False


class ProcessClock(Clock):
    """The clock of one process; its calls wait while the process sleeps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asleep: list[Alarm] | None = None  # the calls to make when it wakes; None: awake

    @property
    def now_ms(self) -> float:  # type: ignore[override]  # it has no time of its own
        return self._clock.now_ms

    def at(self, at_ms: float, call: Callable[[], None]) -> Alarm:
        """Run a call at a time, or when the process wakes."""
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
        """Return whether the process sleeps; if so, the call is made when it wakes."""
        if self._asleep is None:
            return False
        self._asleep.append(Alarm(call))
        return True

    def sleep(self) -> None:
        """Suspend the process: its calls wait from now on."""
        self._asleep = self._asleep or []

    def wake(self) -> None:
        """Wake the process: the calls that were due meanwhile run now, in order."""
        late, self._asleep = self._asleep or [], None
        for alarm in late:
            self._ring(alarm)

    def end(self) -> None:
        """End the process; its deferred calls are dropped, and the next one is awake."""
        self._asleep = None


class WallClock(Clock):
    """The wall clock of a process; `ahead_ms` is its error."""

    def __init__(self, process: ProcessClock) -> None:
        self._process = process
        self.ahead_ms = 0.0

    @property
    def now_ms(self) -> float:  # type: ignore[override]  # it has no time of its own
        return self._process.now_ms + self.ahead_ms

    def at(self, at_ms: float, call: Callable[[], None]) -> Alarm:
        """Run a call at a time of this clock, and never before it."""
        due_ms = at_ms - self.ahead_ms
        while due_ms + self.ahead_ms < at_ms:  # rounding made it early: the caller would wait again
            due_ms = nextafter(due_ms, inf)
        return self._process.at(due_ms, call)

    def defers(self, call: Callable[[], None]) -> bool:
        """Return whether the process sleeps; if so, the call is made when it wakes."""
        return self._process.defers(call)
