"""The router process: stamps the time, calls the core, carries out what it says, keeps the journal.

Decides nothing about requests. It owns the producer, the membership in the fleet, the Faust app,
the outbox and the gate: no record of a partition is applied before all that the log held of it.
What goes wrong here ends this life; whoever takes the partitions next rebuilds them, and that may
be the next life of the same process, where only the log was away.
"""

import asyncio
import logging
from contextlib import aclosing
from typing import Any

from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.errors import LeaseError, RecordError
from schemas.log.clients import LogProducer, bury
from schemas.log.clock import SLEWED_MS, wall_ms
from schemas.log.faust.app import consumer_record
from schemas.log.membership import Membership
from schemas.records import (
    Cancellation,
    Decision,
    Heartbeat,
    KvEvents,
    MemberKind,
    MemberState,
    Outcome,
    Phase,
    Registration,
    Request,
    Resumption,
    Session,
)
from schemas.rules.numbers import check_numbers
from schemas.rules.sizes import check_size
from schemas.settings import LogSettings
from schemas.topics import check_record
from streams.agents.app import TOPICS
from streams.agents.gate import Gate
from streams.agents.journal import Journal
from streams.agents.marks import Marks
from streams.agents.outbox import Lane, Outbox
from streams.agents.policy_table import load_table
from streams.agents.prefixes import Prefixes
from streams.agents.takeover import past_records
from streams.config import RouterSettings
from streams.core.events import (
    CancellationArrived,
    Event,
    FleetRecordArrived,
    KvEventsArrived,
    OutcomeArrived,
    PartitionLost,
    PartitionReady,
    PartitionTaken,
    PhaseArrived,
    Placed,
    RequestArrived,
    ResumptionArrived,
    SessionLoaded,
    Tick,
)
from streams.core.router import Router

log = logging.getLogger(__name__)

_SAVE_MS = 1_000
_RECORDS_PER_TURN = 256  # of a rebuild
_EVENTS: dict[type, Any] = {
    Request: RequestArrived,
    Cancellation: CancellationArrived,
    Resumption: ResumptionArrived,
    Phase: PhaseArrived,
    Outcome: OutcomeArrived,
    Decision: Placed,
    Session: SessionLoaded,
}


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
            on_record=self._fleet_record,
            former_epoch=former_epoch,
        )
        self.prefixes = Prefixes(
            log,
            self.codec,
            self.producer,
            client_id=f"{router_id}-prefixes",
            on_record=self._prefixes_changed,
        )
        self.outbox = Outbox(
            self.producer,
            log.topic_prefix,
            router_id,
            settings.sends_pending_max,
            self.membership.stands,
        )
        self.journal = Journal(router_id)
        self.gate = Gate()
        self.lanes = {topic: Lane() for topic in TOPICS}
        self.seen: dict[tuple[str, int], int] = {}  # offset after the last record read
        self.records_read = 0  # by agents and rebuilds, ever
        self._marks = Marks(self._is_live)
        self._unreadable: set[tuple[str, int, int]] = set()
        self._takeover: asyncio.Task[None] | None = None
        self._now_ms = 0
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _is_live(self, request_id: str) -> bool:
        return self.router.is_live(request_id) or request_id in self.outbox.ending

    def marks(self) -> dict[int, int]:
        """From where on requests matter, of each partition that is rebuilt."""
        return self._marks.oldest({p: self.seen["requests", p] for p in self.router.rebuilt})

    def apply(
        self, event: Event, topic: str, partition: int, offset: int, at_ms: int = 0
    ) -> list[Any]:
        """One event into the core at a time that never runs backwards, and into the journal.

        A core that raised is asked nothing more: the next router begins with a fresh one, and with
        the note of whom this one failed over.
        """
        if self._failed.done():
            return []
        self._now_ms = max(self._now_ms, at_ms or wall_ms())
        self.journal.add(topic, partition, offset, self._now_ms)
        try:
            return self.router.apply(event, self._now_ms)
        except Exception as error:
            self.outbox.put(self.router.blame(self._now_ms))
            self.fail(error)
            raise

    async def take(self, topic: str, event: Any) -> None:
        """One record of the group's, from an agent."""
        try:
            await self._take(topic, event)
        except Exception as error:  # nothing may leave an agent: Faust would acknowledge and go on
            self.fail(error)
            await asyncio.Event().wait()

    async def _take(self, topic: str, event: Any) -> None:
        message, lane = event.message, self.lanes[topic]
        await self.outbox.room()
        if not await self.gate.passes(message.partition):
            return  # of a partition that was taken away; read again by whoever owns it
        if self._failed.done():
            return  # likewise
        self.records_read += 1
        place = (topic, message.partition)
        repeated = message.offset < self.seen.get(place, 0)
        if repeated and (*place, message.offset) not in self._unreadable:
            lane.open(event.ack, 0)
            return
        record = consumer_record(message)
        try:
            found = self._decoded(topic, record)
        except RecordError as error:
            await bury(self.producer, record, error)
            self._unreadable.discard((*place, message.offset))
            self.seen[place] = max(message.offset + 1, self.seen.get(place, 0))
            lane.open(event.ack, 0)
            return
        self.seen[place] = message.offset + 1
        effects = self.apply(found, topic, message.partition, message.offset)
        if isinstance(found, RequestArrived):
            self._marks.arrived(message.partition, message.offset, found.request.request_id)
        self.outbox.put(effects, lane, lane.open(event.ack, len(effects)))

    def _decoded(self, topic: str, record: ConsumerRecord) -> Event:
        found = self.codec.decode(record.value)
        check_record(topic, found)
        check_size(found, len(record.value))
        check_numbers(found)
        if isinstance(found, Request):
            self.outbox.trace(found.request_id, record.headers)
        elif isinstance(found, Outcome):
            self.outbox.traces.pop(found.request_id, None)
        event: Event = _EVENTS[type(found)](found, record.partition)
        return event

    def _fleet_record(self, record: Registration | Heartbeat, offset: int, now_ms: int) -> None:
        member = self.membership.view.members.get(record.member_id)
        is_its = member is not None and member.epoch == record.epoch
        event = FleetRecordArrived(record, offset, member.ahead_ms if member and is_its else 0)
        self.outbox.put(self.apply(event, "fleet", 0, offset, now_ms))

    def _prefixes_changed(self, record: KvEvents, offset: int) -> None:
        event = KvEventsArrived(record, offset)
        self.outbox.put(self.apply(event, "prefixes", 0, offset))

    def assigned(self, partitions: set[int]) -> None:
        """Faust owns these partitions now; rebuild them, then open the gate."""
        self.gate.keep(partitions)
        self._give_up(self.router.owned - partitions)
        taken = sorted(partitions - self.router.owned)
        for partition in taken:
            self.apply(PartitionTaken(partition), "taken", partition, 0)
        self._takeover = asyncio.create_task(self._take_over(taken))
        self._takeover.add_done_callback(self._taken_over)

    def _taken_over(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            self.fail(task.exception())

    async def _take_over(self, partitions: list[int]) -> None:
        requests: list[tuple[int, int, str]] = []
        if partitions:
            started_ms, before = wall_ms(), self.records_read
            requests = await self._rebuild(partitions)
            log.info(
                "%s: rebuilt partitions %s from %d records in %d ms",
                *(self.router_id, partitions, self.records_read - before, wall_ms() - started_ms),
            )
        self.membership.set_state(MemberState.READY)
        for partition in partitions:
            self.outbox.put(self.apply(PartitionReady(partition), "ready", partition, 0))
            self.gate.open(partition)
        for partition, offset, request_id in requests:
            if self._is_live(request_id):
                self._marks.arrived(partition, offset, request_id)

    async def _rebuild(self, partitions: list[int]) -> list[tuple[int, int, str]]:
        """Apply what the log holds; returns partition, offset and id of the requests in it."""
        requests = []
        past = past_records(
            self.log,
            partitions,
            session_ttl_ms=self.settings.session_ttl_ms,
            client_id=f"{self.router_id}-takeover",
            seen=self.seen,
        )
        async with aclosing(past) as records:
            async for topic, record in records:
                self.records_read += 1
                if not self.records_read % _RECORDS_PER_TURN:
                    await asyncio.sleep(0)  # heartbeats have to go on
                if record.value is None:
                    continue
                try:
                    event = self._decoded(topic, record)
                except RecordError:  # Faust delivers it again if nobody has buried it yet
                    self._unreadable.add((topic, record.partition, record.offset))
                    continue
                self.apply(event, topic, record.partition, record.offset)
                if isinstance(event, RequestArrived):
                    requests.append((record.partition, record.offset, event.request.request_id))
        return requests

    async def revoked(self) -> None:
        """Faust owns nothing now. When this returns, all that was decided is in the log, so that
        whoever takes the partitions sees it."""
        self.gate.close()
        self._give_up(self.router.owned)
        self._unreadable.clear()
        for lane in self.lanes.values():
            lane.drop()
        self.flush()
        await self.stop_takeover()
        await self.outbox.drain()

    async def stop_takeover(self) -> None:
        """End a rebuild under way, and wait until what it reads through is closed."""
        if self._takeover is not None:
            self._takeover.cancel()
            await asyncio.wait([self._takeover])

    def _give_up(self, partitions: set[int]) -> None:
        for partition in sorted(partitions):
            self.outbox.put(self.apply(PartitionLost(partition), "lost", partition, 0))
            self._marks.forget(partition)
            for topic in TOPICS:
                self.seen.pop((topic, partition), None)

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

    async def leave(self) -> None:
        """Say goodbye, and close. What a lost life has not written is not written later."""
        await self.membership.leave()
        await self.prefixes.stop()
        if self.membership.is_valid():
            await self.producer.stop()
        else:
            await self.producer.discard()

    def fail(self, error: BaseException | None) -> None:
        """End this life with this error."""
        if not self._failed.done():
            self._failed.set_exception(error or RuntimeError(f"{self.router_id}: failed"))

    async def failure(self) -> None:
        """Wait for a failure, and raise it."""
        await asyncio.shield(self._failed)
