"""Counts the members that crashed on a record of a partition, so that none is retried for ever.

A record whose work ends its member's incarnation or process is the first one without an
acknowledgement, so the next member reads it again. Theory of operation. A member notes the first
record that it takes of a partition before it works on it: a commit at the record's own offset has
the number of members that began it in its metadata. The group's next commit is behind the record
and has no note. So a note names a record that was begun and not finished. Ends without the record's
fault are uncounted: a rebalance, an unreachable broker, a drain. The member that takes such a
record works on nothing else meanwhile, so that no other record is blamed; after `CRASHES_MAX`
members it is dead-lettered. If it is finished after all, the record behind it is noted too: that
one may be what ends the members, before Faust has committed the first.
"""

import asyncio
from collections import Counter
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from schemas.errors import RecordError
from schemas.settings import LogSettings
from streams.log.faust.group import Place
from streams.log.transactions import FullPlace, committed_offsets

CRASHES_MAX = 3
_NOTE, _NOTE_S = "begun=", 5.0


class CrashNotes:
    """The notes of one process, over all its incarnations; call `begin_life` with each app."""

    def __init__(self, settings: LogSettings, group_id: str) -> None:
        self._settings, self._group_id = settings, group_id
        self._prefix = settings.topic_prefix
        self._app: Any = None
        self._notes: asyncio.Future[dict[FullPlace, tuple[int, int]]] | None = None
        self._heads: dict[Place, tuple[int, int]] = {}  # noted offset, times begun
        self._taken_places: set[Place] = (
            set()
        )  # partitions with a record taken since their assignment
        # Counts that this process must take back, and could not write.
        self._uncounted: Counter[tuple[Place, int]] = Counter()

    def begin_life(self, app: Any) -> None:
        """Begin an incarnation with this Faust app."""
        self._app, self._notes = app, None
        self._heads.clear()
        self._taken_places.clear()

    def on_assigned(self, places: set[Place]) -> None:
        """Take these partitions and no others, and read their notes."""
        self._heads.clear()
        self._taken_places.clear()
        self._notes = notes = asyncio.ensure_future(self._read_notes(places))
        notes.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _read_notes(self, places: set[Place]) -> dict[FullPlace, tuple[int, int]]:
        full = [(self._prefix + topic, partition) for topic, partition in sorted(places)]
        positions = await committed_offsets(self._settings, self._group_id, full) if full else {}
        return {
            place: (at.offset, int(at.metadata.removeprefix(_NOTE)))
            for place, at in positions.items()
            if at.metadata.startswith(_NOTE) and at.metadata.removeprefix(_NOTE).isdigit()
        }

    async def begin(self, place: Place, offset: int) -> int:
        """Note a taken record; return how many members crashed on it. Raise BrokerUnavailable."""
        if place in self._taken_places or self._notes is None:
            return 0
        self._taken_places.add(place)
        noted = (await self._notes).get((self._prefix + place[0], place[1]))
        crashes = noted[1] if noted is not None and noted[0] == offset else 0
        crashes = max(0, crashes - self._uncounted.pop((place, offset), 0))
        self._heads[place] = (offset, crashes + 1)
        await self._note(place, offset, crashes + 1)
        return crashes

    def end(self, place: Place, offset: int) -> None:
        """Note that the work on a record has ended."""
        noted_offset, attempts = self._heads.get(place, (-1, 0))
        if noted_offset != offset:
            return
        del self._heads[place]
        if attempts > 1:  # the next record may be the cause: it is noted as well
            self._taken_places.discard(place)

    async def forgive(self) -> None:
        """Uncount the active records, which end for a reason that is not their fault."""
        heads, self._heads = self._heads, {}
        for place, (offset, attempts) in heads.items():
            if not await self._note(place, offset, attempts - 1):
                self._uncounted[place, offset] += 1

    async def _note(self, place: Place, offset: int, attempts: int) -> bool:
        """Commit a note; return whether that succeeded. A member that may not commit has lost the
        partition."""
        tp = TopicPartition(self._prefix + place[0], place[1])
        try:
            async with asyncio.timeout(_NOTE_S):
                await self._app.consumer.commit_note(tp, offset, f"{_NOTE}{attempts}")
        except (KafkaError, TimeoutError):
            return False
        return True


def crash_error(crashes: int) -> RecordError:
    """Return the error with which a record is dead-lettered."""
    return RecordError(
        f"{crashes} members began this record, and each was lost before it had done it: it takes "
        "too long, or ends its process; divide it"
    )
