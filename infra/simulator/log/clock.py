"""Virtual time: calls in order of their time, and of their making where times are equal."""

from collections.abc import Callable
from heapq import heappop, heappush


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
