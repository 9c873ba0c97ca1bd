"""A router that a test plays, and its journal as a recording."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.replay.collecting import RecordedLife, lines_of
from infra.traces.recording import RECORD, RecordingRow, write
from schemas.codec import Codec
from schemas.records import Decision, Heartbeat, JournalSnapshot, Role
from streams.config import RouterSettings
from streams.core.effects import Decide, Effect
from streams.core.events import Tick
from streams.core.router import Router
from streams.journal.journal import READ_BACK, TICK, Journal, JournalEntry, event_of_line
from streams.journal.snapshot import pack_router
from tests.streams import builders
from tests.streams.builders import T0

if TYPE_CHECKING:
    from infra.replay.named_records import Place

CODEC = Codec()
EPOCH = 5


class PlayedRouter:
    """Play one life of a router on partition 0, with one replica."""

    def __init__(self, settings: RouterSettings | None = None, router_id: str = "router-a") -> None:
        self.router = Router(router_id, settings or RouterSettings())
        self.journal = Journal(router_id)
        self.records: dict[Place, bytes] = {}
        self.decisions: list[Decision] = []
        self.effects: list[Effect] = []
        self.now_ms = T0
        self._writes: list[JournalEntry] = []
        self.snapshot()
        self._offset = 0
        self.happens("taken")
        self.happens("ready")

    def happens(self, topic: str, record: Any = None) -> None:
        """Apply one event, 10 ms after the last."""
        self.now_ms += 10
        self._offset += 1
        offset = self._offset
        event = Tick() if topic == TICK else event_of_line(topic, 0, offset, 0, record)
        try:
            effects = self.router.apply(event, self.now_ms)
        except AssertionError:
            effects = self.router.blame(self.now_ms)
        self.effects += effects
        self.decisions += [effect.decision for effect in effects if isinstance(effect, Decide)]
        self.journal.add(event, topic, 0, offset, self.now_ms, effects)
        if topic in READ_BACK:
            self.records[topic, 0, offset] = CODEC.encode(record)

    def snapshot(self) -> None:
        self._writes += self.journal.cut(EPOCH)
        seq, state = self.journal.next_seq, pack_router(self.router)
        self._writes += self.journal.snapshot(self.router.settings, state, seq, EPOCH, self.now_ms)

    def entries(self) -> list[JournalEntry]:
        """Return the journal entries sent so far."""
        self._writes += self.journal.cut(EPOCH)
        return self._writes

    def life(self) -> RecordedLife:
        """Return the life that the journal sent so far records."""
        life = RecordedLife(self.router.router_id, EPOCH)
        for entry in self.entries():
            if isinstance(entry, JournalSnapshot):
                life.add_snapshot(entry)
            else:
                life.lines += lines_of(entry)
        return life

    def recorded(self, path: Path, since_ms: int = 0) -> Path:
        """Write the life and its decisions to a recording file."""
        life = self.life()
        assert life.cut(since_ms, 1 << 62)
        compared = [
            RecordingRow(
                RECORD, topic="decisions", now_ms=decision.at_ms, value=CODEC.encode(decision)
            )
            for decision in self.decisions
        ]
        write(path, {}, [*life.rows(CODEC, self.records), *compared])
        return path


def answered(played: PlayedRouter, names: Iterable[str]) -> PlayedRouter:
    """Apply one request per name, each placed on the one replica."""
    played.happens("fleet", builders.registration("replica-a", Role.REPLICA))
    for seq, name in enumerate(names):
        played.happens("fleet", _beat(played, seq))
        played.happens("requests", builders.request(name, session_id=name))
        played.happens(TICK)
    return played


def _beat(played: PlayedRouter, seq: int) -> Heartbeat:
    room = {Role.REPLICA: 50}
    return builders.beat("replica-a", seq, room, router_id=played.router.router_id)
