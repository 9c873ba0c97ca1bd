"""What a router of a simulated cluster applied, as the rows of a recording, in lives of some time.

A life begins with the state that the router has then, and ends when it dies or after so many looks;
or it only has a snapshot then.
"""

from collections.abc import Sequence
from typing import Any

from infra.simulator.cluster import Checker, Cluster
from infra.traces.recording import LINE, RECORD, SNAPSHOT, RecordingRow
from schemas.codec import Codec
from schemas.records import JournalSnapshot
from streams.core.effects import Decide, Effect
from streams.core.events import (
    Event,
    FleetRecordArrived,
    KvEventsArrived,
    PartitionLost,
    PartitionReady,
    PartitionTaken,
    Tick,
    UsageLoaded,
)
from streams.journal.journal import TICK, effects_sum
from streams.journal.snapshot import pack_router

ROUTER = "router-0"
_OWNERSHIP = {PartitionTaken: "taken", PartitionReady: "ready", PartitionLost: "lost"}
_TOPICS = {
    "Request": "requests",
    "Cancellation": "cancellations",
    "Decision": "decisions",
    "Outcome": "outcomes",
    "Session": "sessions",
}


class Recorder(Checker):
    """Record what a simulated router applies; `rows` is the recording."""

    def __init__(self, looks: int = 40, *, goes_on: bool = False) -> None:
        self.rows: list[RecordingRow] = []
        self.decided: list[RecordingRow] = []
        self._looks_of_life, self._looks, self._life = looks, 0, 0
        self._goes_on = goes_on
        self._seq: int | None = None
        self._codec = Codec()

    @property
    def all_rows(self) -> list[RecordingRow]:
        """Return the rows of all lives, and behind them the decisions."""
        return [*self.rows, *self.decided]

    def on_tick(self, cluster: Cluster) -> None:
        """Begin another life, or another part of one, at intervals."""
        self._looks += 1
        if cluster.router.alive and (self._seq is None or not self._looks % self._looks_of_life):
            if self._seq is None or not self._goes_on:
                self._life, self._seq = self._life + 1, 0
            part = JournalSnapshot(
                router_id=ROUTER,
                router_epoch=self._life,
                seq=self._seq,
                at_ms=int(cluster.clock.now_ms),
                version="",
                settings="",
                part=0,
                parts=1,
                state=pack_router(cluster.router.core),
            )
            value = self._codec.encode(part)
            self.rows.append(RecordingRow(SNAPSHOT, ROUTER, self._life, self._seq, value=value))

    def on_router_death(self) -> None:
        self._seq = None

    def on_event(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        for effect in effects:
            if isinstance(effect, Decide):
                value = self._codec.encode(effect.decision)
                self.decided.append(
                    RecordingRow(
                        RECORD,
                        topic="decisions",
                        offset=len(self.decided),
                        now_ms=int(now_ms),
                        value=value,
                    )
                )
        if self._seq is None:
            return
        topic, partition, offset, ahead_ms, value = self._line_fields(event)
        self.rows.append(
            RecordingRow(LINE, ROUTER, self._life, self._seq, topic, partition, offset, int(now_ms),
                ahead_ms, effects_sum(self._codec, effects), value)
        )  # fmt: skip
        self._seq += 1

    def _line_fields(self, event: Any) -> tuple[str, int, int, int, bytes]:
        match event:
            case Tick():
                return TICK, 0, 0, 0, b""
            case PartitionTaken() | PartitionReady() | PartitionLost():
                return _OWNERSHIP[type(event)], event.partition, 0, 0, b""
            case FleetRecordArrived(record, offset, ahead_ms):
                return "fleet", 0, offset, ahead_ms, self._codec.encode(record)
            case KvEventsArrived(record, offset):
                return "prefixes", 0, offset, 0, self._codec.encode(record)
            case UsageLoaded(request_id, partition):
                return "usage", partition, 0, 0, request_id.encode()
        record = getattr(event, type(event).__match_args__[0])
        topic = _TOPICS.get(type(record).__name__, "phases")
        return topic, event.partition, len(self.rows), 0, self._codec.encode(record)
