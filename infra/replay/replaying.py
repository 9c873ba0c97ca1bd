"""Replays a recording: applies every event to the core again, and compares the effects.

A replay is equal if each line's effects have the checksum in the journal. Of an incarnation that
differs, only the first difference counts, since later lines would differ because of it. It does no
I/O except for reading the file. Called by `trivium replay` and by tests, and for a part of a
recording by `pieces.py`.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.traces.recording import RECORD, SNAPSHOT, RecordingRow, open_recording
from schemas.codec import Codec
from schemas.errors import RecordError
from streams.core.effects import Effect
from streams.core.events import Event
from streams.core.router import Router
from streams.journal.journal import (
    STOPPED,
    TELLS_ID,
    JournalLine,
    effects_sum,
    event_of_line,
    version_of_core,
)
from streams.journal.snapshot import unpack_router

if TYPE_CHECKING:
    from schemas.records import Decision, JournalSnapshot

Watch = Callable[[Router], None]  # called with the router that each incarnation begins with


def content_of(codec: Codec, topic: str, value: bytes) -> Any:
    """Return the record or the id in a line's value; None for an empty value."""
    if topic in TELLS_ID:
        return value.decode()
    return codec.decode(value) if value else None


def event_of(line: JournalLine | RecordingRow, content: Any) -> Event:
    """Return the event that a line recorded."""
    return event_of_line(line.topic, line.partition, line.offset, line.ahead_ms, content)


def apply_event(router: Router, event: Event, now_ms: int) -> tuple[list[Effect], str]:
    """Apply an event; return the effects, and the core's exception as text, or "".

    After an exception the request is blamed, as in a router.
    """
    try:
        return router.apply(event, now_ms), ""
    except Exception as raised:  # the recorded router may have raised any
        return router.blame(now_ms), f"{type(raised).__name__}: {raised}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first line of an incarnation whose effects differ."""

    row: RecordingRow
    event: Event
    effects: list[Effect]
    error: str = ""  # the exception of the core, if it raised one
    decided: list[Any] = field(default_factory=list)  # the log's decisions of that moment


@dataclass(slots=True)
class ReplayedLife:
    """The replay of one incarnation of a router, up to its first difference."""

    router_id: str
    epoch: int
    version: str = ""
    events: int = 0
    with_effects: int = 0
    first_ms: int = 0
    last_ms: int = 0
    is_stopped: bool = False  # it ended regularly; otherwise it continued, or died
    difference: Difference | None = None
    unknown: int = 0  # decisions in the log after its last line


@dataclass(slots=True)
class ReplayReport:
    """The replayed incarnations, and how long the replay took."""

    lives: list[ReplayedLife] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def events(self) -> int:
        return sum(life.events for life in self.lives)

    @property
    def recorded_s(self) -> float:
        """Return the recorded time of all routers together, in seconds."""
        return sum(life.last_ms - life.first_ms for life in self.lives) / 1000

    @property
    def is_equal(self) -> bool:
        return all(life.difference is None for life in self.lives)


def replay(path: Path, watch: Watch | None = None) -> ReplayReport:
    """Replay events one after the other. Raises RecordError for a file that cannot be replayed."""
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    with open_recording(path) as recording:
        records: list[RecordingRow] = []
        replaying = Replayer(split_off_records(recording.rows(), records), recording.codec, watch)
        report = ReplayReport(list(replaying.lives()))
        compare(report, records, recording.codec)
    report.wall_s = time.perf_counter() - begun_s
    report.cpu_s = time.process_time() - begun_cpu_s
    return report


def split_off_records(
    rows: Iterable[RecordingRow], records: list[RecordingRow]
) -> Iterator[RecordingRow]:
    """Yield the rows except records to compare with, which are appended to `records`."""
    for row in rows:
        if row.kind == RECORD:
            records.append(row)
        else:
            yield row


class Replayer:
    """Replays rows in order; `router` is the present incarnation."""

    def __init__(
        self, rows: Iterable[RecordingRow], codec: Codec, watch: Watch | None = None
    ) -> None:
        self.router: Router | None = None
        self._rows, self._codec, self._watch = rows, codec, watch
        self._parts: list[JournalSnapshot] = []

    def lives(self) -> Iterator[ReplayedLife]:
        """Yield each incarnation once all of it is replayed."""
        life: ReplayedLife | None = None
        for row in self._rows:
            if life is None or (life.router_id, life.epoch) != (row.router_id, row.router_epoch):
                if life is not None:
                    yield life
                life = ReplayedLife(row.router_id, row.router_epoch)
                self.router, self._parts = None, []
            if row.kind == SNAPSHOT:
                if self.router is None:  # replays can begin at later snapshots too
                    self._begin(life, row)
            elif life.difference is None:
                self._step(life, row)
        if life is not None:
            yield life

    def _begin(self, life: ReplayedLife, row: RecordingRow) -> None:
        self._parts.append(self._codec.decode(row.value))
        if len(self._parts) < self._parts[0].parts:
            return
        life.version = self._parts[0].version
        try:
            self.router = unpack_router(b"".join(part.state for part in self._parts))
        except RecordError as error:
            raise RecordError(
                f"{life.router_id}: recorded by {life.version}, replayed by {version_of_core()}: "
                f"{error.message}"
            ) from error
        if self._watch is not None:
            self._watch(self.router)

    def _step(self, life: ReplayedLife, row: RecordingRow) -> None:
        if self.router is None:
            raise RecordError(f"{life.router_id}: the recording has no snapshot of it")
        life.first_ms, life.last_ms = life.first_ms or row.now_ms, row.now_ms
        if row.topic == STOPPED:
            life.is_stopped = True
            return
        life.events += 1
        event = event_of(row, content_of(self._codec, row.topic, row.value))
        effects, error = apply_event(self.router, event, row.now_ms)
        life.with_effects += bool(effects)
        if effects_sum(self._codec, effects) != row.effects:
            life.difference = Difference(row, event, effects, error)


def compare(report: ReplayReport, records: Iterable[RecordingRow], codec: Codec) -> None:
    """Add the log's decisions to differences, and count decisions after the last line."""
    decisions: defaultdict[str, list[Decision]] = defaultdict(list)  # by router
    for row in records:
        if row.topic == "decisions":
            decision = codec.decode(row.value)
            decisions[decision.router_id].append(decision)
    for life in report.lives:
        ends = [
            successor.epoch for successor in report.lives if successor.router_id == life.router_id
        ]
        until_ms = min((epoch for epoch in ends if epoch > life.epoch), default=1 << 62)
        for decision in decisions[life.router_id]:
            life.unknown += life.last_ms < decision.at_ms < until_ms
            if life.difference is not None and decision.at_ms == life.difference.row.now_ms:
                life.difference.decided.append(decision)
