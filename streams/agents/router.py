"""The router process: stamps the time, calls the core, hands on what it says, keeps the journal.

Decides nothing about requests. It owns the producer, the membership in the fleet, the core and the
outbox; its records come from `streams/agents/partitions.py`. What goes wrong ends this life;
whoever takes the partitions next rebuilds them, and that may be the next life of the same process,
where only the log was away.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

from schemas.codec import Codec
from schemas.errors import ConfigError, LeaseError
from schemas.log.clients import LogProducer
from schemas.log.clock import SLEWED_MS, wall_ms
from schemas.log.faust.group import Group
from schemas.log.membership import Membership
from schemas.records import (
    Heartbeat,
    JournalBatch,
    KvEvents,
    MemberKind,
    Registration,
    Retrieved,
)
from schemas.rules.sizes import JOURNAL_LINES_MAX
from schemas.settings import LogSettings
from streams.agents.outbox import Outbox, OwnRecord
from streams.agents.prefixes import Prefixes
from streams.agents.retrieval import Retriever
from streams.config import RouterSettings
from streams.core.events import Event, FleetRecordArrived, KvEventsArrived, Tick
from streams.core.placement.ppd_table import PpdTable
from streams.core.router import Router

_SAVE_MS = 1_000
JournalLine = tuple[str, int, int, int]


def load_table(settings: RouterSettings) -> PpdTable | None:
    """The table, where the settings name one, for the policy `table` or for requests that wish it;
    raises ConfigError for what is none.
    """
    if not settings.table:
        return None
    try:
        return PpdTable.from_dict(json.loads(Path(settings.table).read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"router.table: expected a JSON file from `trivium plan ppd` at {settings.table}, "
            f"found {error}"
        ) from error
    except ConfigError as error:
        raise ConfigError(f"router.table: {settings.table}: {error.message}") from error


class Journal:
    """Which record was applied, in which order and at which time: what a replay needs besides the
    records. These lines are not sent yet.
    """

    def __init__(self, router_id: str) -> None:
        self._router_id = router_id
        self._first_seq = 0
        self._lines: list[JournalLine] = []

    def add(self, topic: str, partition: int, offset: int, now_ms: int) -> None:
        """One event was applied; ticks and ownership changes name themselves as topic."""
        self._lines.append((topic, partition, offset, now_ms))

    def cut(self, router_epoch: int) -> list[OwnRecord]:
        """All lines since the last cut, in batches of at most JOURNAL_LINES_MAX."""
        lines, self._lines = self._lines, []
        return [
            self._batch(router_epoch, lines[start : start + JOURNAL_LINES_MAX])
            for start in range(0, len(lines), JOURNAL_LINES_MAX)
        ]

    def _batch(self, router_epoch: int, lines: list[JournalLine]) -> OwnRecord:
        topics, partitions, offsets, times = zip(*lines, strict=True)
        batch = JournalBatch(
            router_id=self._router_id,
            router_epoch=router_epoch,
            first_seq=self._first_seq,
            topics=topics,
            partitions=partitions,
            offsets=offsets,
            now_ms=times,
        )
        self._first_seq += len(lines)
        return OwnRecord("journal", self._router_id, 0, batch)


class RouterProcess:
    """One router; `run` is its life."""

    def __init__(
        self,
        log: LogSettings,
        settings: RouterSettings,
        *,
        router_id: str,
        codec: Codec | None = None,
        former_epoch: int = 0,
    ) -> None:
        self.log = log
        self.settings = settings
        self.router_id = router_id
        self.codec = codec or Codec()
        self.producer = LogProducer(log, self.codec, durable=True, client_id=router_id)
        self.router = Router(router_id, settings, load_table(settings))
        self.membership = Membership(
            log,
            self.codec,
            self.producer,
            member_id=router_id,
            kind=MemberKind.ROUTER,
            on_record=self._apply_fleet_record,
            former_epoch=former_epoch,
        )
        self.prefixes = Prefixes(
            log,
            self.codec,
            self.producer,
            client_id=f"{router_id}-prefixes",
            on_record=self._apply_prefixes,
        )
        self.retriever = Retriever(
            log,
            self.codec,
            self.producer,
            self.membership,
            asks_max=settings.retrievals_max,
            answer=self._answer,
        )
        self.outbox = Outbox(
            self.producer,
            log.topic_prefix,
            router_id,
            settings.sends_pending_max,
            self.membership.stands,
            self.retriever.ask,
        )
        self.journal = Journal(router_id)
        self._now_ms = 0
        self.group = Group()

    def is_live(self, request_id: str) -> bool:
        """Whether a request has not ended, or its end is not in the log yet."""
        return self.router.is_live(request_id) or request_id in self.outbox.ending

    def apply(
        self, event: Event, topic: str, partition: int, offset: int, at_ms: int = 0
    ) -> list[Any]:
        """One event into the core at a time that never runs backwards, and into the journal.

        A core that raised is asked nothing more: the next router begins with a fresh one, and with
        the note of whom this one failed over.
        """
        if self.group.has_failed:
            return []
        self._now_ms = max(self._now_ms, at_ms or wall_ms())
        self.journal.add(topic, partition, offset, self._now_ms)
        try:
            return self.router.apply(event, self._now_ms)
        except Exception as error:
            self.outbox.put(self.router.blame(self._now_ms))
            self.group.fail(error)
            raise

    def _apply_fleet_record(
        self, record: Registration | Heartbeat, offset: int, now_ms: int
    ) -> None:
        member = self.membership.view.members.get(record.member_id)
        is_its = member is not None and member.epoch == record.epoch
        event = FleetRecordArrived(record, offset, member.ahead_ms if member and is_its else 0)
        self.outbox.put(self.apply(event, "fleet", 0, offset, now_ms))

    def _apply_prefixes(self, record: KvEvents, offset: int) -> None:
        event = KvEventsArrived(record, offset)
        self.outbox.put(self.apply(event, "prefixes", 0, offset))

    def _answer(self, retrieved: Retrieved, partition: int) -> None:
        """Write down what was found, unless nobody here waits for it any more."""
        if self.router.is_live(retrieved.request_id):
            self.outbox.put([OwnRecord("phases", retrieved.session_id, partition, retrieved)])

    def flush(self) -> None:
        """Send the journal's lines and the changed sessions."""
        self.outbox.put(self.journal.cut(self.membership.epoch))
        self.outbox.save_sessions()

    async def tick(self) -> None:
        """Time passes, until cancelled."""
        settings, loop = self.settings, asyncio.get_running_loop()
        flushed_ms = saved_ms = wall_ms()
        due_s = loop.time()
        while True:
            self.outbox.put(self.apply(Tick(), "tick", 0, 0))
            if self._now_ms - wall_ms() > SLEWED_MS:
                raise LeaseError(f"{self.router_id}: the clock was set back; begins anew")
            if self._now_ms - flushed_ms >= settings.journal_flush_ms - settings.tick_ms:
                flushed_ms = self._now_ms
                self.outbox.put(self.journal.cut(self.membership.epoch))
            if self._now_ms - saved_ms >= _SAVE_MS:
                saved_ms = self._now_ms
                self.outbox.save_sessions()
            due_s = max(due_s + settings.tick_ms / 1000, loop.time())
            await asyncio.sleep(due_s - loop.time())

    async def join(self) -> None:
        """Connect and join the fleet, before any partition is taken."""
        await self.producer.start()
        await self.prefixes.start()
        await self.membership.join()

    async def close(self) -> None:
        """Say goodbye, and close. What a lost life has not written is not written later."""
        await self.retriever.stop()
        await self.membership.leave()
        await self.prefixes.stop()
        if self.membership.is_valid():
            await self.producer.stop()
        else:
            await self.producer.discard()
