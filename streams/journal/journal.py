"""The journal of a router: all events that it applied, in order, with values that topics lose.

A line names a record by its topic, partition and offset. It has the record itself if its topic is
compacted, and the id of a request whose usage was written; everything else stays in the log as long
as the journal. Each line has a checksum of its effects, so that a replay (`infra/replay`) finds the
first difference. A replay can begin at a snapshot: the first one is made when the router joins,
others every `router.snapshot_ms`. A router that dies writes no line `stopped`; its events after
the last line are not known.

`event_of` converts a record to an event of the core, live and in replays, and `event_of_line` a
line. The journal sends nothing; `streams/agents/router.py` sends the batches that `cut` returns.
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
from schemas.records import (
    Cancellation,
    Continued,
    Decision,
    JournalBatch,
    JournalSnapshot,
    Outcome,
    Phase,
    Request,
    Resumption,
    Retrieved,
    Session,
    Usage,
)
from schemas.rules.sizes import JOURNAL_BYTES_MAX, JOURNAL_LINES_MAX
from streams import core
from streams.config import RouterSettings
from streams.core.effects import Effect
from streams.core.events import (
    CancellationArrived,
    ContinuedArrived,
    DecisionLoaded,
    Event,
    FleetRecordArrived,
    KvEventsArrived,
    OutcomeArrived,
    PartitionLost,
    PartitionReady,
    PartitionTaken,
    PhaseArrived,
    RequestArrived,
    ResumptionArrived,
    RetrievedArrived,
    SessionLoaded,
    Tick,
    UsageLoaded,
)

_EVENTS: dict[type, Any] = {
    Request: RequestArrived,
    Cancellation: CancellationArrived,
    Resumption: ResumptionArrived,
    Phase: PhaseArrived,
    Retrieved: RetrievedArrived,
    Continued: ContinuedArrived,
    Outcome: OutcomeArrived,
    Decision: DecisionLoaded,
    Session: SessionLoaded,
    Usage: lambda usage, partition: UsageLoaded(usage.request_id, partition),
}
_OWNERSHIP: dict[str, Any] = {
    "taken": PartitionTaken,
    "ready": PartitionReady,
    "lost": PartitionLost,
}
TICK, PASSED_OVER, STOPPED = "tick", "passed_over", "stopped"  # lines without a record
READ_BACK = ("requests", "cancellations", "phases", "decisions", "prefixes")  # lines without values
TELLS_ID = ("usage", PASSED_OVER)  # lines that carry a request's id


def event_of(record: Any, partition: int) -> Event:
    """Return the event of a record of a session partition."""
    event: Event = _EVENTS[type(record)](record, partition)
    return event


def event_of_line(topic: str, partition: int, offset: int, ahead_ms: int, content: Any) -> Event:
    """Return the event of a journal line; `content` is its record, its request's id (usage), or
    None."""
    if topic == TICK:
        return Tick()
    if topic in _OWNERSHIP:
        event: Event = _OWNERSHIP[topic](partition)
        return event
    if topic in TELLS_ID:
        return UsageLoaded(content, partition)
    if topic == "fleet":
        return FleetRecordArrived(content, offset, ahead_ms)
    if topic == "prefixes":
        return KvEventsArrived(content, offset)
    return event_of(content, partition)


_NO_NEWS = ("fleet", TICK)
JournalEntry = JournalBatch | JournalSnapshot


class JournalLine(NamedTuple):
    """One event: its source, the time when it was applied, its value, its effects' checksum."""

    topic: str
    partition: int
    offset: int
    now_ms: int
    ahead_ms: int = 0
    value: bytes = b""
    effects: int = 0


class Journal:
    """The lines since the last cut; builds batches of them, and snapshots."""

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
        """Add an applied event; for ticks and changes of ownership, `topic` is their name."""
        ahead_ms = event.ahead_ms if isinstance(event, FleetRecordArrived) else 0
        value, followed = self._value(event), effects_sum(self._codec, effects)
        self.has_news |= topic not in _NO_NEWS or bool(effects)
        self._lines.append(JournalLine(topic, partition, offset, now_ms, ahead_ms, value, followed))

    def _value(self, event: Event) -> bytes:
        """Return the part of an event that a replay could not read from the log."""
        match event:
            case FleetRecordArrived(record) | OutcomeArrived(record) | SessionLoaded(record):
                return self._codec.encode(record)
            case UsageLoaded(request_id):
                return request_id.encode()
        return b""

    def stop(self, now_ms: int) -> None:
        """Add the last line of a regular end: no events follow it."""
        self._lines.append(JournalLine(STOPPED, 0, 0, now_ms))

    def cut(self, router_epoch: int) -> list[JournalBatch]:
        """Return all lines since the last cut, in batches that fit the log."""
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
        """Return a router's state before line `seq`, in parts that fit the log."""
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
    """Return the state in parts that fit the log, each in a copy of `snapshot`."""
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
    """Return a checksum of effects with all their fields; 0 without effects."""
    checksum = 0
    effect: Any  # a slotted class, which its decorator hides from mypy
    for effect in effects:
        checksum = zlib.crc32(type(effect).__name__.encode(), checksum)
        for name in effect.__slots__:
            checksum = zlib.crc32(_plain(codec, getattr(effect, name)), checksum)
    return checksum


def _plain(codec: Codec, value: Any) -> bytes:
    return codec.encode(value) if hasattr(value, "__slots__") else repr(value).encode()


@cache
def version_of_core() -> str:
    """Return the core's version: the package's, and a checksum of the core's files."""
    checksum = 0
    for path in sorted(Path(core.__path__[0]).rglob("*.py")):
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return f"{version('trivium')}+{checksum:08x}"
