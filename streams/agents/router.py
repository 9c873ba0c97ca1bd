"""The router process: takes records, stamps the time, calls the core, has its effects sent.

Decides nothing about requests. It owns the producer, the membership in the fleet, the core, the
journal and the outbox. No new record of a partition is applied before its rebuild is complete: a
gate makes it wait (`streams/agents/partitions.py` opens it). An error ends this incarnation, and
the next owner of the partitions rebuilds them. If only the log was unreachable, that may be the
next incarnation in the same process (`streams/agents/lifecycle.py`).
"""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.errors import ConfigError, LeaseError, RecordError, TriviumError
from schemas.records import (
    Heartbeat,
    KvEvents,
    MemberKind,
    Outcome,
    Registration,
    Request,
    Retrieved,
)
from schemas.rules.numbers import check_numbers
from schemas.rules.sizes import check_size
from schemas.settings import LogSettings
from schemas.topics import check_record
from streams.agents.outbox import Outbox, OwnRecord
from streams.agents.prefixes import Prefixes
from streams.agents.retrieval import Retriever
from streams.agents.usage import UsageWriter
from streams.config import RouterSettings
from streams.core.events import Event, FleetRecordArrived, KvEventsArrived, RequestArrived, Tick
from streams.core.handlers.retrievals import RETRIEVALS_MAX
from streams.core.placement.ppd_table import PpdTable
from streams.core.router import Router
from streams.journal.journal import TICK, Journal, JournalEntry, event_of
from streams.journal.snapshot import pack_router, snapshot_in_fork
from streams.log.clients import LogProducer, send_dead_letter
from streams.log.clock import SLEWED_MS, wall_ms
from streams.log.faust.app import consumer_record
from streams.log.faust.group import Group
from streams.log.membership import Membership

log = logging.getLogger(__name__)

_SAVE_MS = 1_000
_FLUSH_MS: Final = 200  # so a killed router's journal ends at most this long before it
_SENDS_PENDING_MAX: Final = 10_000  # unacknowledged ones; above it the agents wait
_SPARE = 1_024  # entries of `Marks` beyond twice its live requests
_IDLE_TICK_MS, _IDLE_FLUSH_MS = 250, 1_000


def load_table(settings: RouterSettings) -> PpdTable | None:
    """Return the table that the settings name, for policy `table` and requests that wish it.

    Return None if they name none. Raise ConfigError for an unreadable or invalid file.
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


class Marks:
    """Offsets of requests in order of arrival; drops those that have ended."""

    def __init__(self, is_live: Callable[[str], bool]) -> None:
        self._is_live = is_live
        self._arrived: dict[int, list[tuple[int, str]]] = {}
        self._lengths_max: dict[int, int] = {}  # above it, ended requests are dropped

    def add(self, partition: int, offset: int, request_id: str) -> None:
        """Add a request that was read and applied."""
        requests = self._arrived.setdefault(partition, [])
        requests.append((offset, request_id))
        if len(requests) > self._lengths_max.get(partition, _SPARE):
            self._clear(partition)

    def _clear(self, partition: int) -> None:
        live = [(at, name) for at, name in self._arrived[partition] if self._is_live(name)]
        self._arrived[partition], self._lengths_max[partition] = live, 2 * len(live) + _SPARE

    def forget(self, partition: int) -> None:
        """Drop the requests of a partition that another router owns now."""
        self._arrived.pop(partition, None)
        self._lengths_max.pop(partition, None)

    def oldest(self, read: dict[int, int]) -> dict[int, int]:
        """Return the mark of each partition; `read` has the offsets up to which each was read."""
        marks = {}
        for partition, end in read.items():
            if partition in self._arrived:
                self._clear(partition)
            live = self._arrived.get(partition)
            marks[partition] = min(offset for offset, _ in live) if live else end
        return marks


class Gate:
    """Makes records wait until their partition is rebuilt; one future per partition: True once
    records may pass, False if the partition was revoked."""

    def __init__(self) -> None:
        self._passing: dict[int, asyncio.Future[bool]] = {}

    async def passes(self, partition: int) -> bool:
        """Wait until the partition is rebuilt; return False if it was revoked instead."""
        passing = self._future(partition)
        return passing.result() if passing.done() else await asyncio.shield(passing)

    def open(self, partition: int) -> None:
        """Let the records of a rebuilt partition pass."""
        passing = self._future(partition)
        if not passing.done():
            passing.set_result(True)

    def keep(self, partitions: set[int]) -> None:
        """Reject records that wait for any other partition."""
        for partition in set(self._passing) - partitions:
            self._turn_away(partition)

    def close(self) -> None:
        """Reject all waiting records; later ones wait again."""
        for partition in list(self._passing):
            self._turn_away(partition)

    def _future(self, partition: int) -> "asyncio.Future[bool]":
        """Return the partition's future; create it if a record precedes its assignment."""
        passing = self._passing.get(partition)
        if passing is None:
            passing = self._passing[partition] = asyncio.get_running_loop().create_future()
        return passing

    def _turn_away(self, partition: int) -> None:
        passing = self._passing.pop(partition)
        if not passing.done():
            passing.set_result(False)


class RouterProcess:
    """One incarnation of a router: `join`, then its loops, then `close`."""

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
        self.membership.policies = self.router.placer.policies
        self.membership.backlogs_source = lambda: self.router.backlogs(wall_ms())
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
            asks_max=RETRIEVALS_MAX,
            answer=self._answer,
        )
        self.usage = UsageWriter(log, self.codec, router_id)
        self.outbox = Outbox(
            self.producer,
            log.topic_prefix,
            router_id,
            _SENDS_PENDING_MAX,
            self.membership.wait_until_valid,
            self.retriever.ask,
            self.usage.write,
        )
        self.journal = Journal(router_id)
        self._now_ms = 0
        self.group = Group()
        self.gate = Gate()
        self.marks = Marks(self.is_live)
        self.unreadable: set[tuple[str, int, int]] = set()  # in a rebuild; not dead-lettered

    def is_live(self, request_id: str) -> bool:
        """Return whether a request's outcome or usage is not in the log yet."""
        return self.router.is_live(request_id) or request_id in self.outbox.ending

    async def take(self, topic: str, event: Any) -> None:
        """Take one record of the consumer group from a Faust agent: decode it, apply it to the
        core, and have its effects sent. The last one acknowledges it."""
        await self.group.guard(self._take(topic, event))

    async def _take(self, topic: str, event: Any) -> None:
        group, message = self.group, event.message
        place = (topic, message.partition)
        await self.outbox.wait_for_room()
        if not await self.gate.passes(message.partition):
            return  # the partition was revoked; its next owner reads the record
        if group.has_failed:
            return  # the next owner reads it
        group.records_read += 1
        repeated = message.offset < group.next_offsets.get(place, 0)
        if repeated and (*place, message.offset) not in self.unreadable:
            group.receipts.open(place, event.ack, 0)
            return
        record = consumer_record(message)
        try:
            decoded = self.decode(topic, record)
        except RecordError as error:
            await send_dead_letter(self.producer, record, error)
            self.unreadable.discard((*place, message.offset))
            group.next_offsets[place] = max(message.offset + 1, group.next_offsets.get(place, 0))
            group.receipts.open(place, event.ack, 0)
            return
        group.next_offsets[place] = message.offset + 1
        effects = self.apply(decoded, topic, message.partition, message.offset)
        if isinstance(decoded, RequestArrived):
            self.marks.add(message.partition, message.offset, decoded.request.request_id)
        self.outbox.put(effects, group.receipts.open(place, event.ack, len(effects)))

    def decode(self, topic: str, record: ConsumerRecord) -> Event:
        """Return the event of a record of one of the group's topics, or of one of a takeover. Raise
        RecordError if it is unreadable or invalid."""
        decoded = self.codec.decode(record.value)
        check_record(topic, decoded)
        check_size(decoded, len(record.value))
        check_numbers(decoded)
        if isinstance(decoded, Request):
            self.outbox.remember_trace(decoded.request_id, record.headers)
        elif isinstance(decoded, Outcome):
            self.outbox.traces.pop(decoded.request_id, None)
        return event_of(decoded, record.partition)

    def apply(
        self, event: Event, topic: str, partition: int, offset: int, at_ms: int = 0
    ) -> list[Any]:
        """Apply one event to the core, at a time that never goes back, and add it to the journal.

        A core that raised is not called again: the next router begins with a fresh one, and with
        the decision that blames the request over which this one failed.
        """
        if self.group.has_failed:
            return []
        self._now_ms = now_ms = max(self._now_ms, at_ms or wall_ms())
        try:
            effects: list[Any] = self.router.apply(event, now_ms)
        except Exception as error:
            blamed = self.router.blame(now_ms)
            self.journal.add(event, topic, partition, offset, now_ms, blamed)
            self.outbox.put(blamed)
            self.group.fail(error)
            raise
        self.journal.add(event, topic, partition, offset, now_ms, effects)
        return effects

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
        """Write the result of a search, unless its request is no longer live here."""
        if self.router.is_live(retrieved.request_id):
            self.outbox.put([OwnRecord("phases", retrieved.session_id, partition, retrieved)])

    def flush(self) -> None:
        """Send the journal's lines and the changed sessions."""
        self._cut()
        self.outbox.save_sessions()

    def stop_journal(self) -> None:
        """Mark the journal as complete: no event is applied after this."""
        self.journal.stop(self._now_ms)

    async def keep_snapshots(self) -> None:
        """Add a snapshot to the journal every `snapshot_ms`, where a replay can begin, until
        cancelled. A failed one only costs a longer replay."""
        while True:
            await asyncio.sleep(self.settings.snapshot_ms / 1000)
            seq, now_ms = self._cut(), wall_ms()
            try:
                state = await snapshot_in_fork(self.router)
            except (OSError, TriviumError) as error:
                log.warning("%s: no snapshot this time: %s", self.router_id, error)
            else:
                self._put_snapshot(state, seq, now_ms)

    def _put_snapshot(self, state: bytes, seq: int, now_ms: int) -> None:
        epoch = self.membership.epoch
        self._put_journal(self.journal.snapshot(self.settings, state, seq, epoch, now_ms))

    def _cut(self) -> int:
        """Send the journal's lines; return the number of the next one."""
        self._put_journal(self.journal.cut(self.membership.epoch))
        return self.journal.next_seq

    def _put_journal(self, entries: Sequence[JournalEntry]) -> None:
        self.outbox.put([OwnRecord("journal", self.router_id, 0, entry) for entry in entries])

    async def tick(self) -> None:
        """Apply ticks until cancelled. While the router is idle, steps are longer, and the journal
        is sent later."""
        settings, loop = self.settings, asyncio.get_running_loop()
        flushed_ms = saved_ms = wall_ms()
        ticked_ms, due_s = 0, loop.time()
        while True:
            now_ms = max(self._now_ms, wall_ms())
            if not self.router.is_idle or now_ms - ticked_ms >= _IDLE_TICK_MS:
                ticked_ms = now_ms
                self.outbox.put(self.apply(Tick(), TICK, 0, 0))
            if self._now_ms - wall_ms() > SLEWED_MS:
                raise LeaseError(f"{self.router_id}: the clock was set back; begins anew")
            if now_ms - flushed_ms >= self._flush_ms() - settings.tick_ms:
                flushed_ms = now_ms
                self._cut()
            if now_ms - saved_ms >= _SAVE_MS:
                saved_ms = now_ms
                self.outbox.save_sessions()
            due_s = max(due_s + settings.tick_ms / 1000, loop.time())
            await asyncio.sleep(due_s - loop.time())

    def _flush_ms(self) -> int:
        return _FLUSH_MS if self.journal.has_news else _IDLE_FLUSH_MS

    async def join(self) -> None:
        """Connect and join the fleet, before the router takes any partition."""
        await self.producer.start()
        await self.prefixes.start()
        await self.membership.join()
        self._put_snapshot(pack_router(self.router), self._cut(), wall_ms())

    async def close(self) -> None:
        """Leave the fleet, and close. If the lease is lost, drop what is not yet written."""
        await self.retriever.stop()
        await self.usage.keep(())
        await self.membership.leave()
        await self.prefixes.stop()
        if self.membership.is_valid():
            await self.producer.stop()
        else:
            await self.producer.discard()
