"""Collects from the log what a replay needs: what routers' incarnations applied.

Of each incarnation with lines in the span, it takes the last snapshot before the span, or else the
first one, the lines from there to the span's end, and the snapshots between them. Then it reads the
records that those lines refer to. All of it is in memory meanwhile. Called by `trivium record` and
by tests.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.replay.named_records import NamedRecords, Place
from infra.replay.redacting import redact
from infra.traces.recording import LINE, RECORD, SNAPSHOT, RecordingRow, write
from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.records import JournalBatch, JournalSnapshot
from schemas.settings import LogSettings
from schemas.topics import TOPICS
from streams.journal.journal import READ_BACK, STOPPED, JournalLine
from streams.log.clients import AssignedReader
from streams.log.registry import make_codec

COMPARED = ("decisions", "outcomes", "usage")  # recorded beside what was applied
BODIES, NAMES = "bodies", "names"  # what a recording may leave out
LATE_MS = 60_000  # how much later than a router's action the log may have its records


@dataclass
class RecordedLife:
    """What the journal has of one incarnation of a router."""

    router_id: str
    epoch: int
    snapshots: list[list[JournalSnapshot]] = field(default_factory=list)
    lines: list[tuple[int, JournalLine]] = field(default_factory=list)  # with their numbers

    def add_snapshot(self, part: JournalSnapshot) -> None:
        """Add a part of a snapshot; parts come in order."""
        if part.part == 0:
            self.snapshots.append([])
        if self.snapshots:  # else the first parts were deleted from the log
            self.snapshots[-1].append(part)

    def cut(self, since_ms: int, until_ms: int) -> bool:
        """Keep what a replay of the span needs; return False if the span cannot be replayed or has
        no lines."""
        whole = [parts for parts in self.snapshots if len(parts) == parts[0].parts]
        before = [parts for parts in whole if parts[0].at_ms <= since_ms]
        self.snapshots = whole[max(0, len(before) - 1) :]
        if not self.snapshots:
            return False
        seq = self.snapshots[0][0].seq
        lines = []
        for number, line in self.lines:
            if number == seq and line.now_ms <= until_ms:
                lines.append((number, line))
                seq += 1
        self.lines = lines
        first, *later = self.snapshots
        self.snapshots = [first, *(parts for parts in later if parts[0].seq < seq)]
        return bool(lines) and lines[-1][1].now_ms >= since_ms

    @property
    def is_stopped(self) -> bool:
        """Return whether the router ended regularly."""
        return bool(self.lines) and self.lines[-1][1].topic == STOPPED

    def rows(self, codec: Codec, records: dict[Place, bytes]) -> Iterator[RecordingRow]:
        """Yield the rows of this incarnation; `records` has the records that its lines refer to."""
        snapshots = {parts[0].seq: parts for parts in self.snapshots}
        for number, line in self.lines:
            for part in snapshots.get(number, ()):
                yield RecordingRow(
                    SNAPSHOT, self.router_id, self.epoch, part.seq, value=codec.encode(part)
                )
            place = line.topic, line.partition, line.offset
            value = records[place] if line.topic in READ_BACK else line.value
            yield RecordingRow(
                LINE,
                self.router_id,
                self.epoch,
                number,
                *place,
                line.now_ms,
                line.ahead_ms,
                line.effects,
                value,
            )


async def record(
    log: LogSettings,
    path: Path,
    since_ms: int,
    until_ms: int,
    *,
    look_back_ms: int,
    leaves_out: Sequence[str] = (),
) -> list[RecordedLife]:
    """Write the recording and return its incarnations of routers.

    `look_back_ms` is the longest time between snapshots. `BODIES` and `NAMES` may be left out.
    Raises RecordError where nothing in the span can be replayed.
    """
    codec = await asyncio.to_thread(make_codec, log)
    lives = [
        life
        for life in await _lives(log, codec, since_ms - look_back_ms, until_ms)
        if life.cut(since_ms, until_ms)
    ]
    if not lives:
        raise RecordError(
            "journal: nothing to replay in this span: no router applied anything, or no snapshot "
            "is kept of one that did"
        )
    plain = Codec()
    records = await _read_back(log, codec, lives)
    begin_ms = min(life.lines[0][1].now_ms for life in lives)
    compared_rows = await _read_compared(log, codec, begin_ms, until_ms)

    def rows() -> Iterator[RecordingRow]:
        for life in lives:
            yield from life.rows(plain, records)
        yield from compared_rows

    def write_all() -> None:
        about = {"since_ms": since_ms, "until_ms": until_ms, "topic_prefix": log.topic_prefix}
        written = redact(rows(), names=NAMES in leaves_out) if leaves_out else rows()
        write(path, about | {"leaves_out": list(leaves_out)}, written)

    await asyncio.to_thread(write_all)
    return lives


async def _lives(
    log: LogSettings, codec: Codec, since_ms: int, until_ms: int
) -> list[RecordedLife]:
    """Return all incarnations in the journal of that time, in order of their epochs."""
    lives: dict[tuple[str, int], RecordedLife] = {}
    reader = AssignedReader(log, "journal", [0], client_id="trivium-record")
    async with reader.reading("nowhere"):
        ends = await reader.offsets_at(until_ms + LATE_MS)
        await reader.seek(await reader.offsets_at(max(0, since_ms)))
        async for records in reader.until(ends):
            for message in records:
                entry = _decode(codec, message.value)
                if entry is None:
                    continue
                key = entry.router_id, entry.router_epoch
                life = lives.setdefault(key, RecordedLife(*key))
                if isinstance(entry, JournalSnapshot):
                    life.add_snapshot(entry)
                elif entry.effects:  # older batches have no such columns
                    life.lines += lines_of(entry)
    return sorted(lives.values(), key=lambda life: life.epoch)


def _decode(codec: Codec, value: bytes | None) -> Any:
    """Return the record, or None for an unreadable one, which routers do not apply either."""
    with suppress(RecordError):
        return codec.decode(value) if value else None
    return None


def lines_of(batch: JournalBatch) -> Iterator[tuple[int, JournalLine]]:
    """Yield the lines of a batch with their numbers."""
    columns = batch.topics, batch.partitions, batch.offsets, batch.now_ms
    effect_columns = batch.ahead_ms, batch.values, batch.effects
    lines = map(JournalLine._make, zip(*columns, *effect_columns, strict=True))
    return enumerate(lines, batch.first_seq)


async def _read_back(
    log: LogSettings, codec: Codec, lives: list[RecordedLife]
) -> dict[Place, bytes]:
    """Return the records that the lines refer to, in a framing that needs no schema registry."""
    places = {
        (line.topic, line.partition, line.offset)
        for life in lives
        for _, line in life.lines
        if line.topic in READ_BACK
    }
    async with AsyncExitStack() as stack:
        records = NamedRecords(log, codec, "trivium-record")
        await records.start(stack)
        values = await records.read(places)
    for topic, partition, offset in sorted(places - values.keys()):
        raise RecordError(
            f"{topic}[{partition}]: the record at {offset} was applied and is gone; "
            "the log keeps it too short, or record a later span"
        )
    return values


async def _read_compared(
    log: LogSettings, codec: Codec, since_ms: int, until_ms: int
) -> list[RecordingRow]:
    """Return decisions and ends of the span, with the times at which the log appended them."""
    plain, rows = Codec(), list[RecordingRow]()
    for topic in COMPARED:
        partitions = range(log.partitions(TOPICS[topic].group))
        reader = AssignedReader(
            log, topic, partitions, client_id="trivium-record", committed_only=topic == "usage"
        )
        async with reader.reading("nowhere"):
            ends = await reader.offsets_at(until_ms + LATE_MS)
            await reader.seek(await reader.offsets_at(since_ms))
            async for records in reader.until(ends):
                for message in records:
                    record = _decode(codec, message.value)
                    if message.timestamp <= until_ms and record is not None:
                        row = RecordingRow(
                            RECORD, "", 0, 0, topic, message.partition, message.offset
                        )
                        value = plain.encode(record)
                        rows.append(row._replace(now_ms=message.timestamp, value=value))
    return rows
