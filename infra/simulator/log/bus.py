"""The log on virtual time: a record reaches its readers after the log's latency, in order.

One channel is one partition of one topic. `delay_ms` may be changed while it runs, by a fault; the
order within a channel stays. With a limit it takes records by the log's own rule; without one no
size is worked out, which would cost more than all else here.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from infra.simulator.log.clock import Clock
from schemas.codec import Codec
from schemas.errors import RecordTooLarge
from schemas.rules.sizes import check_size

Channel = tuple[str, int]  # topic and partition
Wrote = Callable[[str, object, float], None]  # topic, record, when


@dataclass(slots=True)
class _Written:
    """What was sent to a channel."""

    records: int = 0
    last_ms: float = 0.0  # when the last one is delivered


class Bus:
    """Carries calls instead of bytes: what a reader does with the record."""

    def __init__(self, clock: Clock, delay_ms: float, record_bytes_max: int = 0) -> None:
        """`record_bytes_max` is the broker's limit; 0: any size passes."""
        self.clock = clock
        self.delay_ms = delay_ms
        self.record_bytes_max = record_bytes_max
        self.twice: set[str] = set()  # topics whose next record is delivered twice
        self.on_wrote: list[Wrote] = []
        self._codec = Codec() if record_bytes_max else None
        self._written: defaultdict[Channel, _Written] = defaultdict(_Written)

    def sent(self, topic: str, partition: int) -> int:
        """The offset of the channel's next record."""
        return self._written[topic, partition].records

    def send(self, channel: Channel, record: Any, deliver: Callable[[], None]) -> None:
        """Deliver later, never before what was sent to the channel earlier.

        Raises RecordTooLarge, as `LogProducer.send` does, and then delivers nothing.
        """
        if self._codec is not None:
            self._check(record, len(self._codec.encode(record)))
        written, at_ms = self._written[channel], self.clock.now_ms + self.delay_ms
        written.records += 1
        written.last_ms = at_ms = max(at_ms, written.last_ms)
        self.clock.at(at_ms, deliver)
        if channel[0] in self.twice:
            self.twice.discard(channel[0])
            self.clock.at(at_ms, deliver)
        if self.on_wrote:
            self.note(channel[0], record)

    def note(self, topic: str, record: Any) -> None:
        """Tell who looks on that a record stands in the log, of whose readers there is no model."""
        for wrote in self.on_wrote:
            wrote(topic, record, self.clock.now_ms)

    def _check(self, record: Any, record_bytes: int) -> None:
        check_size(record, record_bytes)
        if record_bytes > self.record_bytes_max:
            raise RecordTooLarge(
                f"{type(record).__name__}: the broker takes {self.record_bytes_max} bytes, "
                f"found {record_bytes}"
            )
