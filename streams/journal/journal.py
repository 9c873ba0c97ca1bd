"""The journal of a router: all that it applied, in order, with what a replay cannot read back.

A line names a record by its topic, partition and offset. It carries the record itself where its
topic is compacted, and the id of a request whose usage was told; everything else stays in the log
as long as the journal does. With each line stands a checksum of what followed from it, so that a
replay (`infra/replay`) sees the first difference. Snapshots say where a replay can begin: the first
as the life begins, others every `router.snapshot_ms`. Whoever dies leaves no line `stopped`; what
it did after its last line is not known.

These lines are not sent yet; `streams/agents/router.py` sends what `cut` returns.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from schemas.codec import Codec
from schemas.records import JournalBatch, JournalSnapshot
from schemas.rules.sizes import JOURNAL_BYTES_MAX, JOURNAL_LINES_MAX
from streams import core
from streams.config import RouterSettings
from streams.core.effects import Effect
from streams.core.events import (
    Event,
    FleetRecordArrived,
    OutcomeArrived,
    SessionLoaded,
    UsageLoaded,
)
from streams.journal.inputs import STOPPED, TICK

_NO_NEWS = ("fleet", TICK)
JournalEntry = JournalBatch | JournalSnapshot


class JournalLine(NamedTuple):
    """One event: where it comes from, when it was applied, what it was, what followed."""

    topic: str
    partition: int
    offset: int
    now_ms: int
    ahead_ms: int = 0
    value: bytes = b""
    effects: int = 0


class Journal:
    """Lines since the last cut, and snapshots between them."""

    def __init__(self, router_id: str) -> None:
        self.next_seq = 0
        self._router_id = router_id
        self._codec = Codec()  # readable without a schema registry
        self._lines: list[JournalLine] = []
        self.has_news = False  # since the last cut: more than heartbeats and ticks without effects

    def add(
        self,
        event: Event,
        topic: str,
        partition: int,
        offset: int,
        now_ms: int,
        effects: Sequence[Effect],
    ) -> None:
        """One event was applied; ticks and changes of ownership name themselves as topic."""
        ahead_ms = event.ahead_ms if isinstance(event, FleetRecordArrived) else 0
        value, followed = self._value(event), effects_sum(self._codec, effects)
        self.has_news |= topic not in _NO_NEWS or bool(effects)
        self._lines.append(JournalLine(topic, partition, offset, now_ms, ahead_ms, value, followed))

    def _value(self, event: Event) -> bytes:
        """What a replay could not read back."""
        match event:
            case FleetRecordArrived(record) | OutcomeArrived(record) | SessionLoaded(record):
                return self._codec.encode(record)
            case UsageLoaded(request_id):
                return request_id.encode()
        return b""

    def stop(self, now_ms: int) -> None:
        """The life ends as it should: nothing is missing behind this line."""
        self._lines.append(JournalLine(STOPPED, 0, 0, now_ms))

    def cut(self, router_epoch: int) -> list[JournalBatch]:
        """All lines since the last cut, in batches that fit the log."""
        lines, self._lines, self.has_news = self._lines, [], False
        batches, begin, value_bytes = [], 0, 0
        for end, line in enumerate(lines):
            value_bytes += len(line.value)
            if end - begin == JOURNAL_LINES_MAX or (
                end > begin and value_bytes > JOURNAL_BYTES_MAX
            ):
                batches.append(self._batch(router_epoch, lines[begin:end]))
                begin, value_bytes = end, len(line.value)
        if lines:
            batches.append(self._batch(router_epoch, lines[begin:]))
        return batches

    def _batch(self, router_epoch: int, lines: list[JournalLine]) -> JournalBatch:
        topics, partitions, offsets, times, ahead, values, effects = zip(*lines, strict=True)
        batch = JournalBatch(
            router_id=self._router_id,
            router_epoch=router_epoch,
            first_seq=self.next_seq,
            topics=topics,
            partitions=partitions,
            offsets=offsets,
            now_ms=times,
            ahead_ms=ahead,
            values=values,
            effects=effects,
        )
        self.next_seq += len(lines)
        return batch

    def snapshot(
        self, settings: RouterSettings, state: bytes, seq: int, router_epoch: int, now_ms: int
    ) -> list[JournalSnapshot]:
        """A router's state as of the line of that number, in parts that fit the log."""
        whole = JournalSnapshot(
            router_id=self._router_id,
            router_epoch=router_epoch,
            seq=seq,
            at_ms=now_ms,
            version=version_of_core(),
            settings=json.dumps(asdict(settings)),
            part=0,
            parts=1,
            state=b"",
        )
        return in_parts(whole, state)


def in_parts(snapshot: JournalSnapshot, state: bytes) -> list[JournalSnapshot]:
    """This state in parts that fit the log."""
    starts = range(0, len(state), JOURNAL_BYTES_MAX)
    return [
        replace(
            snapshot,
            part=number,
            parts=len(starts),
            state=state[start : start + JOURNAL_BYTES_MAX],
        )
        for number, start in enumerate(starts)
    ]


def effects_sum(codec: Codec, effects: Sequence[Effect]) -> int:
    """A checksum of effects with all that is in them; 0 of none."""
    checksum = 0
    effect: Any  # a slotted class, which its decorator does not say
    for effect in effects:
        checksum = zlib.crc32(type(effect).__name__.encode(), checksum)
        for name in effect.__slots__:
            checksum = zlib.crc32(_plain(codec, getattr(effect, name)), checksum)
    return checksum


def _plain(codec: Codec, value: Any) -> bytes:
    return codec.encode(value) if hasattr(value, "__slots__") else repr(value).encode()


@cache
def version_of_core() -> str:
    """What decides here: the version, and a checksum of the core's files."""
    checksum = 0
    for path in sorted(Path(core.__path__[0]).rglob("*.py")):
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return f"{version('trivium')}+{checksum:08x}"
