"""The log on virtual time: a record reaches its readers after the log's latency, in order.

One channel is one partition of one topic. `delay_ms` may be changed while it runs, by a fault; the
order within a channel stays.
"""

from collections.abc import Callable

from infra.simulator.clock import Clock

Channel = tuple[str, int]  # topic and partition


class Bus:
    """Carries calls instead of bytes: what a reader does with the record."""

    def __init__(self, clock: Clock, delay_ms: float) -> None:
        self.clock = clock
        self.delay_ms = delay_ms
        self._last_ms: dict[Channel, float] = {}
        self._offsets: dict[Channel, int] = {}

    def sent(self, topic: str, partition: int) -> int:
        """The offset of the channel's next record."""
        return self._offsets.get((topic, partition), 0)

    def send(self, channel: Channel, deliver: Callable[[], None]) -> None:
        """Deliver later, never before what was sent to the channel earlier."""
        at_ms = max(self.clock.now_ms + self.delay_ms, self._last_ms.get(channel, 0.0))
        self._last_ms[channel] = at_ms
        self.clock.at(at_ms, deliver)
        self._offsets[channel] = self._offsets.get(channel, 0) + 1
