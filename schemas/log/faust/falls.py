"""Which record of a partition its members fell on, so that none is taken up for ever.

A record whose work ends its member's life, or its process, is read again by whoever is next: it is
the first one that is not acknowledged. Theory of operation. The first record that a member takes of
a partition is noted before it is worked on, in the metadata of a commit at its own offset: how many
have begun it. The next commit of the group is behind it and says nothing. So who finds a note finds
a record that somebody began and did not end. Ends that are no fault of the record's are taken back:
a rebalance, a broker that was away, a drain. Who takes it works on nothing else meanwhile, so that
no other record is blamed, and after `FALLS_MAX` of them it is buried. If it is done after all, the
record behind it is noted too: where lives end before Faust has committed, that one ends them.
"""

import asyncio
from collections import Counter
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from schemas.errors import RecordError
from schemas.log.faust.receipts import Place
from schemas.log.transactions import FullPlace, committed
from schemas.settings import LogSettings

FALLS_MAX = 3
_NOTE, _NOTE_S = "begun=", 5.0


class Falls:
    """Of one process, over all its lives; `begin_life` with each app."""

    def __init__(self, settings: LogSettings, group_id: str) -> None:
        self._settings, self._group_id = settings, group_id
        self._prefix = settings.topic_prefix
        self._app: Any = None
        self._begun: asyncio.Future[dict[FullPlace, tuple[int, int]]] | None = None
        self._heads: dict[Place, tuple[int, int]] = {}  # offset of what is noted, begun so often
        self._seen: set[Place] = set()  # partitions of which a record was taken since assigned
        # What this process has to take back, and could not write.
        self._forgiven: Counter[tuple[Place, int]] = Counter()

    def begin_life(self, app: Any) -> None:
        """With this app of Faust's."""
        self._app, self._begun = app, None
        self._heads.clear()
        self._seen.clear()

    def assigned(self, places: set[Place]) -> None:
        """These partitions, and no others, are this member's: see what is noted of them."""
        self._heads.clear()
        self._seen.clear()
        self._begun = begun = asyncio.ensure_future(self._noted(places))
        begun.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _noted(self, places: set[Place]) -> dict[FullPlace, tuple[int, int]]:
        full = [(self._prefix + topic, partition) for topic, partition in sorted(places)]
        found = await committed(self._settings, self._group_id, full) if full else {}
        return {
            place: (at.offset, int(at.metadata.removeprefix(_NOTE)))
            for place, at in found.items()
            if at.metadata.startswith(_NOTE) and at.metadata.removeprefix(_NOTE).isdigit()
        }

    async def begin(self, place: Place, offset: int) -> int:
        """How many fell on a record that is taken now. Raises BrokerUnavailable."""
        if place in self._seen or self._begun is None:
            return 0
        self._seen.add(place)
        noted = (await self._begun).get((self._prefix + place[0], place[1]))
        falls = noted[1] if noted is not None and noted[0] == offset else 0
        falls = max(0, falls - self._forgiven.pop((place, offset), 0))
        self._heads[place] = (offset, falls + 1)
        await self._note(place, offset, falls + 1)
        return falls

    def end(self, place: Place, offset: int) -> None:
        """It is done."""
        noted_offset, begun = self._heads.get(place, (-1, 0))
        if noted_offset != offset:
            return
        del self._heads[place]
        if begun > 1:  # they may have fallen on what is behind it: that is noted as well
            self._seen.discard(place)

    async def forgive(self) -> None:
        """What is under way ends for another reason than a record."""
        heads, self._heads = self._heads, {}
        for place, (offset, begun) in heads.items():
            if not await self._note(place, offset, begun - 1):
                self._forgiven[place, offset] += 1

    async def _note(self, place: Place, offset: int, begun: int) -> bool:
        """Whether it is on the log; a member that may not commit has lost the partition."""
        tp = TopicPartition(self._prefix + place[0], place[1])
        try:
            async with asyncio.timeout(_NOTE_S):
                await self._app.consumer.commit_note(tp, offset, f"{_NOTE}{begun}")
        except (KafkaError, TimeoutError):
            return False
        return True


def fallen(falls: int) -> RecordError:
    """Why a record is buried."""
    return RecordError(
        f"{falls} members began this record, and each was lost before it had done it: it takes too "
        "long, or ends its process; divide it"
    )
