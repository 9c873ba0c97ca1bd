"""Commits from where a takeover has to read: the offset of each partition's oldest live request.

A mark is the offset, committed in a group of its own, before which every request has ended and its
outcome is in the log. So a takeover depends on no time horizon, no longest deadline, and not on the
offsets that Faust commits as soon as a request is placed. Called by `streams/agents/lifecycle.py`
and `streams/agents/partitions.py`.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from schemas.settings import LogSettings
from streams.log.connecting import query_client

MARK_S = 1.0  # between two commits
_SPARE = 1_024  # entries of a list beyond twice its live requests
Offsets = dict[int, int]  # by partition


class Marks:
    """Offsets of requests in order of arrival; drops those that have ended."""

    def __init__(self, is_live: Callable[[str], bool]) -> None:
        self._is_live = is_live
        self._arrived: dict[int, list[tuple[int, str]]] = {}
        self._lengths_max: dict[int, int] = {}  # above it, ended requests are dropped

    def add(self, partition: int, offset: int, request_id: str) -> None:
        """Add a request that was read and applied."""
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
        """Return the mark of each partition; `read` has the offsets up to which each was read."""
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
        """Return the current marks of the partitions that are rebuilt."""


def marks_group(log: LogSettings) -> str:
    """Return the group under which marks are committed; it has no members."""
    return f"{log.topic_prefix}router.live"


async def keep_marks(log: LogSettings, partitions: MarkSource) -> None:
    """Commit changed marks until cancelled. A failed commit only costs a longer rebuild."""
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
