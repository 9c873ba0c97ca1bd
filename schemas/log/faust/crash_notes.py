"""Which record of a partition its members fell on, so that none is taken up for ever.

A record whose work ends its member's life, or its process, is read again by whoever is next: it is
the first one that is not acknowledged. Theory of operation. The first record that a member takes of
a partition is noted before it is worked on, in the metadata of a commit at its own offset: how many
have begun it. The next commit of the group is behind it and says nothing. So who finds a note finds
a record that somebody began and did not end. Ends that are no fault of the record's are taken back:
a rebalance, a broker that was away, a drain. Who takes it works on nothing else meanwhile, so that
no other record is blamed, and after `CRASHES_MAX` of them it is buried. If it is done after all,
the record behind it is noted too: where lives end before Faust has committed, that one ends them.
"""

import asyncio
from collections import Counter
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from schemas.errors import RecordError
from schemas.log.faust.receipts import Place
from schemas.log.transactions import FullPlace, committed_offsets
from schemas.settings import LogSettings

CRASHES_MAX = 3
_NOTE, _NOTE_S = "begun=", 5.0


class CrashNotes:
    """Of one process, over all its lives; `begin_life` with each app."""

    def __init__(self, settings: LogSettings, group_id: str) -> None:
        self._settings, self._group_id = settings, group_id
        self._prefix = settings.topic_prefix
        self._app: Any = None
        self._notes: asyncio.Future[dict[FullPlace, tuple[int, int]]] | None = None
        self._heads: dict[Place, tuple[int, int]] = {}  # offset of what is noted, begun so often
        self._taken_places: set[Place] = (
            set()
        )  # partitions of which a record was taken since assigned
        # What this process has to take back, and could not write.
        self._uncounted: Counter[tuple[Place, int]] = Counter()

    def begin_life(self, app: Any) -> None:
        """With this app of Faust's."""
        self._app, self._notes = app, None
        self._heads.clear()
        self._taken_places.clear()

    def on_assigned(self, places: set[Place]) -> None:
        """These partitions, and no others, are this member's: see what is noted of them."""
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
        """How many fell on a record that is taken now. Raises BrokerUnavailable."""
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
        if attempts > 1:  # they may have fallen on what is behind it: that is noted as well
            self._taken_places.discard(place)

    async def forgive(self) -> None:
        """What is under way ends for another reason than a record."""
        heads, self._heads = self._heads, {}
        for place, (offset, attempts) in heads.items():
            if not await self._note(place, offset, attempts - 1):
                self._uncounted[place, offset] += 1

    async def _note(self, place: Place, offset: int, attempts: int) -> bool:
        """Whether it is on the log; a member that may not commit has lost the partition."""
        tp = TopicPartition(self._prefix + place[0], place[1])
        try:
            async with asyncio.timeout(_NOTE_S):
                await self._app.consumer.commit_note(tp, offset, f"{_NOTE}{attempts}")
        except (KafkaError, TimeoutError):
            return False
        return True


def crash_error(crashes: int) -> RecordError:
    """Why a record is buried."""
    return RecordError(
        f"{crashes} members began this record, and each was lost before it had done it: it takes "
        "too long, or ends its process; divide it"
    )
