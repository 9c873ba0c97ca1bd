"""Decides beside the routers with other settings, and does nothing else.

A shadow reads the routers' journals and applies what they applied, as a replay does
(`replaying.py`), but at once. So it has their fleets, credits, queues and learned speeds, and sees
what really became of each request. At each placement it asks a placer of its own (`redeciding.py`)
and writes the answer to `decisions.shadow`. It compares the effects of events with the checksum in
the journal, and drops them. It joins no consumer group and no fleet, so no member waits for it,
grants it credits, or depends on it. Called by `trivium run router --shadow`.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

from infra.replay.collecting import lines_of
from infra.replay.named_records import Place
from infra.replay.redeciding import Redeciding
from infra.replay.replaying import apply_event, content_of, event_of
from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.records import (
    Decision,
    JournalSnapshot,
    Mode,
    Reason,
)
from streams.core.effects import Decide, Effect
from streams.core.requests.live import Placement
from streams.core.requests.recovery import PLACING
from streams.core.router import Router
from streams.journal.journal import READ_BACK, STOPPED, JournalEntry, JournalLine, effects_sum
from streams.journal.snapshot import unpack_router

log = logging.getLogger(__name__)
RouterLife = tuple[str, int]  # a router's id and epoch


class FollowedRouter:
    """One incarnation of a router, whose journal is applied as it grows."""

    def __init__(self, router_id: str, redeciding: Redeciding, codec: Codec) -> None:
        self.router_id = router_id
        self._redeciding, self._codec = redeciding, codec
        self._parts: list[JournalSnapshot] = []
        self._router: Router | None = None
        self._next_seq = 0
        self._placements: list[Placement | None] = []

    def begin(self, part: JournalSnapshot) -> None:
        """Take a part of a snapshot; the state is loaded from the first whole one, or the next
        after a loss.
        """
        if self._router is not None:
            return
        self._parts = [*(self._parts if part.part else ()), part]
        if len(self._parts) < part.parts or self._parts[0].part:
            return
        self._router = unpack_router(b"".join(part.state for part in self._parts))
        self._next_seq, self._parts = part.seq, []
        self._redeciding.watch(self._router, self._placements.append)

    def wants(self, seq: int) -> bool:
        """Return whether a line of that number comes next, or later."""
        return self._router is not None and seq >= self._next_seq

    def step(
        self, seq: int, line: JournalLine, value: bytes
    ) -> list[tuple[Decide, Placement | None]]:
        """Apply a line; return each placement of the router with that of the other settings.

        Raises RecordError where the effects differ from the journal's or lines are missing. The
        router is then not followed until its next snapshot.
        """
        router = self._router
        assert router is not None, "`wants` has said so"
        if seq != self._next_seq:
            self._lose(f"lines {self._next_seq} to {seq - 1} of its journal are missing")
        self._next_seq = seq + 1
        self._placements.clear()
        effects = self._apply_line(router, line, value)
        if effects_sum(self._codec, effects) != line.effects:
            self._lose(f"line {seq} of its journal, {line.topic}, has other effects here")
        decides = [effect for effect in effects if isinstance(effect, Decide)]
        placed = [decide for decide in decides if decide.decision.kind in PLACING]
        return list(zip(placed, self._placements, strict=True))

    def _apply_line(self, router: Router, line: JournalLine, value: bytes) -> list[Effect]:
        if line.topic in READ_BACK and not value:
            self._lose(f"{line.topic}[{line.partition}] no longer has the record at {line.offset}")
        event = event_of(line, content_of(self._codec, line.topic, value))
        return apply_event(router, event, line.now_ms)[0]

    def _lose(self, why: str) -> None:
        self._router = None
        raise RecordError(f"{self.router_id}: {why}; followed again from its next snapshot")


def would_decide(shadow_id: str, placement: Decide, would: Placement | None) -> Decision:
    """Return the router's decision as the shadow would have written it; its mode is none if the
    request would have waited."""
    was = placement.decision
    if would is None:
        would = Placement(policy="", mode=Mode.NONE, reason=Reason.UNKNOWN)
    prefill, decode = would.prefill, would.decode
    return replace(
        was,
        router_id=shadow_id,
        policy=would.policy,
        reason=would.reason,
        mode=would.mode,
        orchestration=would.orchestration,
        prefill_worker="" if prefill is None else prefill.worker_id,
        prefill_epoch=0 if prefill is None else prefill.epoch,
        decode_worker="" if decode is None else decode.worker_id,
        decode_epoch=0 if decode is None else decode.epoch,
        candidates=(),
        w_ttft=would.w_ttft,
        w_tpot=would.w_tpot,
        load=would.load,
        estimate=would.estimate,
        wished_policy=would.unmet_wishes.policy,
        wished_orchestration=would.unmet_wishes.orchestration,
        unmet=would.unmet_wishes.unmet,
        policy_reason=would.policy_reason,
    )


class Shadow:
    """Follows all routers; reads and writes nothing itself."""

    def __init__(self, shadow_id: str, overrides: Mapping[str, str], since_ms: int) -> None:
        """Use these settings, as text, in place of the routers'; yield no decisions from before
        `since_ms`. Raises ConfigError for settings that placements do not use."""
        self.shadow_id = shadow_id
        self._redeciding = Redeciding(overrides)
        self._since_ms = since_ms
        # By router: the time of the last line whose decisions were yielded, and of the last
        # written.
        self._yielded_ms: dict[str, int] = {}
        self._written_ms: dict[str, int] = {}
        self._followed: dict[RouterLife, FollowedRouter] = {}
        self._codec = Codec()

    def begin(self) -> None:
        """Stop following; the journal is read again from the last snapshots."""
        self._followed.clear()

    def mark_written(self) -> None:
        """Mark all yielded decisions as written, so that they are not yielded again."""
        self._written_ms = dict(self._yielded_ms)

    def apply(
        self, entry: JournalEntry, records: Mapping[Place, bytes]
    ) -> Iterator[tuple[Decision, int]]:
        """Apply an entry of a journal, with the records that it refers to; yield decisions with
        their partitions."""
        followed = self._follow((entry.router_id, entry.router_epoch))
        try:
            if isinstance(entry, JournalSnapshot):
                followed.begin(entry)
            elif entry.effects:  # older batches have no such column
                for seq, line in lines_of(entry):
                    yield from self._step(followed, seq, line, records)
        except RecordError as error:
            log.warning("%s: %s", self.shadow_id, error.message)

    def _step(
        self, followed: FollowedRouter, seq: int, line: JournalLine, records: Mapping[Place, bytes]
    ) -> Iterator[tuple[Decision, int]]:
        if line.topic == STOPPED or not followed.wants(seq):
            return
        value = line.value
        if line.topic in READ_BACK:
            value = records.get((line.topic, line.partition, line.offset), b"")
        placements = followed.step(seq, line, value)
        router_id = followed.router_id
        if placements and line.now_ms > self._written_ms.get(router_id, self._since_ms - 1):
            self._yielded_ms[router_id] = line.now_ms
            for placed, would in placements:
                yield would_decide(self.shadow_id, placed, would), placed.partition

    def _follow(self, life: RouterLife) -> FollowedRouter:
        """Return the follower of this incarnation, and drop those of the router's earlier ones."""
        router_id, epoch = life
        for key in [key for key in self._followed if key[0] == router_id and key[1] < epoch]:
            del self._followed[key]
        if life not in self._followed:
            self._followed[life] = FollowedRouter(router_id, self._redeciding, self._codec)
        return self._followed[life]


def places_to_read(entries: list[JournalEntry]) -> list[Place]:
    """Return the places of the records that the entries refer to."""
    return [
        (line.topic, line.partition, line.offset)
        for entry in entries
        if not isinstance(entry, JournalSnapshot) and entry.effects
        for _, line in lines_of(entry)
        if line.topic in READ_BACK
    ]
