"""From where a takeover has to read: the oldest live request of each partition, told to the broker.

A mark is the offset, committed in a group of its own, before which every request has ended and its
outcome is in the log. So nothing has to agree with it: no horizon in time, no longest deadline, and
not the offsets that Faust commits as soon as a request is placed.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from schemas.log.connecting import query_client
from schemas.settings import LogSettings

MARK_S = 1.0  # between two commits
_SPARE = 1_024  # ended requests that are kept in a list beside as many live ones
Offsets = dict[int, int]  # by partition


class Marks:
    """Offsets of requests in order of arrival, without those that have ended since."""

    def __init__(self, is_live: Callable[[str], bool]) -> None:
        self._is_live = is_live
        self._arrived: dict[int, list[tuple[int, str]]] = {}
        self._lengths_max: dict[int, int] = {}  # above it a list is cleared of ended ones

    def add(self, partition: int, offset: int, request_id: str) -> None:
        """A request was read, and applied."""
        requests = self._arrived.setdefault(partition, [])
        requests.append((offset, request_id))
        if len(requests) > self._lengths_max.get(partition, _SPARE):
            self._clear(partition)

    def _clear(self, partition: int) -> None:
        live = [(at, name) for at, name in self._arrived[partition] if self._is_live(name)]
        self._arrived[partition], self._lengths_max[partition] = live, 2 * len(live) + _SPARE

    def forget(self, partition: int) -> None:
        """Drop the requests of a partition that another router owns now."""
        self._arrived.pop(partition, None)
        self._lengths_max.pop(partition, None)

    def oldest(self, read: Offsets) -> Offsets:
        """The mark of each partition, where `read` is the offset up to which it was read."""
        marks = {}
        for partition, end in read.items():
            if partition in self._arrived:
                self._clear(partition)
            live = self._arrived.get(partition)
            marks[partition] = min(offset for offset, _ in live) if live else end
        return marks


class MarkSource(Protocol):
    """A source of marks: the partitions that a router owns."""

    def marks(self) -> Offsets:
        """As of now, of the partitions that are rebuilt."""


def marks_group(log: LogSettings) -> str:
    """The group under which marks are committed; nobody reads in it."""
    return f"{log.topic_prefix}router.live"


async def keep_marks(log: LogSettings, partitions: MarkSource) -> None:
    """Commit what has changed, until cancelled. A commit that fails only costs a longer rebuild."""
    places = [
        TopicPartition(f"{log.topic_prefix}requests", p) for p in range(log.session_partitions)
    ]
    committed_marks: Offsets = {}
    async with query_client(log, marks_group(log)) as consumer:
        consumer.assign(places)
        consumer.pause(*places)  # it only commits
        while True:
            await asyncio.sleep(MARK_S)
            marks = partitions.marks()
            changed = {places[p]: at for p, at in marks.items() if committed_marks.get(p) != at}
            with contextlib.suppress(KafkaError):
                if changed:
                    await consumer.commit(changed)
                    committed_marks = marks
