"""The log on virtual time: a record reaches its readers after the log's latency, in order.

A channel is one partition of one topic. Faults may change `delay_ms`, slow a topic down (`slow`),
repeat or lose a record, or hold everything; the order within a channel stays. With a limit, the bus
checks sizes by the log's own rule. Without one it computes no sizes, as that would cost more than
all else here.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from infra.simulator.log.clock import Clock
from schemas.codec import Codec
from schemas.errors import RecordTooLarge
from schemas.rules.sizes import check_size

Channel = tuple[str, int]  # topic and partition
RecordListener = Callable[[str, object, float], None]  # topic, record, when

LOST = "lost"  # the topic that record listeners get for a lost record


@dataclass(slots=True)
class _ChannelState:
    """The records that were sent to a channel."""

    records: int = 0
    last_ms: float = 0.0  # when the last one is delivered


@cache
def shared_codec() -> Codec:
    """Return one codec for all clusters; making one takes longer than serving many requests."""
    return Codec()


class Bus:
    """Delivers a record by a call of its reader, not as bytes."""

    def __init__(self, clock: Clock, delay_ms: float, record_bytes_max: int = 0) -> None:
        """`record_bytes_max` is the broker's limit; 0: any size passes."""
        self.clock = clock
        self.delay_ms = delay_ms
        self.drawn_ms: Callable[[str], float] | None = (
            None  # replaces `delay_ms`; called with each record's topic
        )
        self.record_bytes_max = record_bytes_max
        self.repeated_topics: set[str] = set()  # topics whose next record is delivered twice
        self.repeat_after_ms: dict[str, float] = {}  # ms until a topic's next record repeats
        self.slow: dict[str, float] = {}  # extra delay in ms, by topic
        self.losing: dict[str, int] = {}  # number of next records to lose, by topic
        self.lost_records = 0
        self.held_until_ms = 0.0  # nothing is delivered before that
        self.record_listeners: list[RecordListener] = []
        self._codec = shared_codec() if record_bytes_max else None
        self._channels: defaultdict[Channel, _ChannelState] = defaultdict(_ChannelState)

    def next_offset(self, topic: str, partition: int) -> int:
        """Return the offset of the channel's next record."""
        return self._channels[topic, partition].records

    def send(
        self, channel: Channel, record: Any, deliver: Callable[[], None], *, forged: bool = False
    ) -> None:
        """Deliver a record later, in the order of its channel.

        Raises RecordTooLarge, as `LogProducer.send` does, and then delivers nothing. Listeners do
        not get forged records.
        """
        self.check(record)
        topic, state = channel[0], self._channels[channel]
        state.records += 1
        is_lost = bool(self.losing.get(topic))
        if is_lost:
            self.losing[topic] -= 1
            self.lost_records += 1
        else:
            self._deliver(channel, deliver)
            if topic in self.repeated_topics:
                self.repeated_topics.discard(topic)
                self._deliver(channel, deliver)
            if topic in self.repeat_after_ms:
                self.clock.after(
                    self.repeat_after_ms.pop(topic), lambda: self._deliver(channel, deliver)
                )
        if self.record_listeners and not forged:
            self.note(LOST if is_lost else topic, record)

    def _deliver(self, channel: Channel, deliver: Callable[[], None]) -> None:
        state, topic = self._channels[channel], channel[0]
        delay_ms = self.drawn_ms(topic) if self.drawn_ms is not None else self.delay_ms
        at_ms = self.clock.now_ms + delay_ms + self.slow.get(topic, 0.0)
        state.last_ms = at_ms = max(at_ms, state.last_ms, self.held_until_ms)
        self.clock.at(at_ms, deliver)

    def note(self, topic: str, record: Any) -> None:
        """Pass a record to the listeners; also used for topics whose readers are not modelled."""
        for listener in self.record_listeners:
            listener(topic, record, self.clock.now_ms)

    def check(self, record: Any) -> None:
        """Raise RecordTooLarge if the log would refuse the record."""
        if self._codec is None:
            return
        record_bytes = len(self._codec.encode(record))
        check_size(record, record_bytes)
        if record_bytes > self.record_bytes_max:
            raise RecordTooLarge(
                f"{type(record).__name__}: the broker takes {self.record_bytes_max} bytes, "
                f"found {record_bytes}"
            )
