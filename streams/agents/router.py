"""The router process: stamps the time, calls the core, carries out what it says, keeps the journal.

Decides nothing about requests. It owns the producer, the membership in the fleet, the Faust app,
the outbox and the gate: no record of a partition is applied before all that the log held of it.
What goes wrong here ends the process; whoever takes the partitions next rebuilds them.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.log.clients import LogProducer, bury
from schemas.log.clock import wall_ms
from schemas.log.faust_app import consumer_record, run_app
from schemas.log.membership import Membership
from schemas.records import (
    Heartbeat,
    KvEvents,
    MemberKind,
    MemberState,
    Outcome,
    Registration,
    Request,
)
from schemas.settings import LogSettings
from schemas.topics import check_record
from streams.agents.app import TOPICS, add_agents, make_app
from streams.agents.gate import Gate
from streams.agents.journal import Journal
from streams.agents.outbox import Lane, Outbox
from streams.agents.prefixes import Prefixes
from streams.agents.table import load_table
from streams.agents.takeover import past_records
from streams.agents.watchdog import watch_progress
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
    SessionLoaded,
    Tick,
)
from streams.core.router import Router

log = logging.getLogger(__name__)

_SAVE_MS = 1_000
_WIND_UP_S = 15
_EVENTS: dict[str, Any] = {
    "requests": RequestArrived,
    "cancellations": CancellationArrived,
    "phases": PhaseArrived,
    "outcomes": OutcomeArrived,
    "decisions": Placed,
    "sessions": SessionLoaded,
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
        )
        self.prefixes = Prefixes(
            log,
            self.codec,
            self.producer,
            client_id=f"{router_id}-prefixes",
            on_record=self._prefixes_changed,
        )
        self.outbox = Outbox(self.producer, log.topic_prefix, router_id, settings.sends_pending_max)
        self.journal = Journal(router_id)
        self.gate = Gate()
        self.lanes = {topic: Lane() for topic in TOPICS}
        self.seen: dict[tuple[str, int], int] = {}  # offset after the last record read
        self._unreadable: set[tuple[str, int, int]] = set()
        self._takeover: asyncio.Task[None] | None = None
        self._now_ms = 0
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

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
        self.outbox.put(effects, lane, lane.open(event.ack, len(effects)))

    def _decoded(self, topic: str, record: ConsumerRecord) -> Event:
        found = self.codec.decode(record.value)
        check_record(topic, found)
        if isinstance(found, Request):
            self.outbox.trace(found.request_id, record.headers)
        elif isinstance(found, Outcome):
            self.outbox.traces.pop(found.request_id, None)
        event: Event = _EVENTS[topic](found, record.partition)
        return event

    def _fleet_record(self, record: Registration | Heartbeat, offset: int, now_ms: int) -> None:
        event = FleetRecordArrived(record, offset)
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
        if partitions:
            started_ms = wall_ms()
            count = await self._rebuild(partitions)
            log.info(
                "%s: rebuilt partitions %s from %d records in %d ms",
                *(self.router_id, partitions, count, wall_ms() - started_ms),
            )
        self.membership.set_state(MemberState.READY)
        for partition in partitions:
            self.outbox.put(self.apply(PartitionReady(partition), "ready", partition, 0))
            self.gate.open(partition)

    async def _rebuild(self, partitions: list[int]) -> int:
        count = 0
        past = past_records(
            self.log,
            partitions,
            horizon_ms=self.settings.recovery_horizon_ms,
            client_id=f"{self.router_id}-takeover",
            seen=self.seen,
        )
        async with aclosing(past) as records:
            async for topic, record in records:
                count += 1
                if record.value is None:
                    continue
                try:
                    event = self._decoded(topic, record)
                except RecordError:  # Faust delivers it again if nobody has buried it yet
                    self._unreadable.add((topic, record.partition, record.offset))
                    continue
                self.apply(event, topic, record.partition, record.offset)
        return count

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
            for topic in TOPICS:
                self.seen.pop((topic, partition), None)

    def flush(self) -> None:
        """Send the journal's lines and the changed sessions."""
        batch = self.journal.cut(self.membership.epoch)
        if batch is not None:
            self.outbox.put([batch])
        self.outbox.save_sessions()

    async def tick(self) -> None:
        """Time passes, until cancelled."""
        settings, loop = self.settings, asyncio.get_running_loop()
        flushed_ms = saved_ms = wall_ms()
        due_s = loop.time()
        while True:
            self.outbox.put(self.apply(Tick(), "tick", 0, 0))
            if self._now_ms - flushed_ms >= settings.journal_flush_ms - settings.tick_ms:
                flushed_ms = self._now_ms
                batch = self.journal.cut(self.membership.epoch)
                self.outbox.put([batch] if batch is not None else [])
            if self._now_ms - saved_ms >= _SAVE_MS:
                saved_ms = self._now_ms
                self.outbox.save_sessions()
            due_s = max(due_s + settings.tick_ms / 1000, loop.time())
            await asyncio.sleep(due_s - loop.time())

    def fail(self, error: BaseException | None) -> None:
        """End the process with this error."""
        if not self._failed.done():
            self._failed.set_exception(error or RuntimeError(f"{self.router_id}: failed"))

    async def failure(self) -> None:
        """Wait for a failure, and raise it."""
        await asyncio.shield(self._failed)


async def run_router(
    log: LogSettings,
    router: RouterSettings,
    *,
    router_id: str,
    stop: asyncio.Event,
    codec: Codec | None = None,
) -> None:
    """Route until `stop` is set; raises what ended it otherwise."""
    process = RouterProcess(log, router, router_id=router_id, codec=codec)
    app = make_app(log, router_id)
    add_agents(app, log.topic_prefix, process)
    await process.producer.start()

    async def on_assigned(sender: Any, assigned: Any, **_: Any) -> None:
        process.assigned({tp.partition for tp in assigned})

    async def on_revoked(sender: Any, revoked: Any, **_: Any) -> None:
        await process.revoked()

    app.on_partitions_assigned.connect(on_assigned)
    app.on_partitions_revoked.connect(on_revoked)
    await process.prefixes.start()
    await process.membership.join()
    lives: Sequence[Any] = (
        process.outbox.run(),
        process.membership.run(),
        process.prefixes.run(),
        process.tick(),
        watch_progress(log, router, process),
        process.failure(),
        run_app(app),
        stop.wait(),
    )
    tasks = [asyncio.create_task(life) for life in lives]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await _wind_up(process, app, tasks)


async def _wind_up(process: RouterProcess, app: Any, tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Stop reading, let what was decided out, say goodbye. Bounded: the log has everything else."""
    outbox, membership, *others = tasks
    for task in others:
        task.cancel()
    try:
        async with asyncio.timeout(_WIND_UP_S):
            await app.stop()
            await process.stop_takeover()
            process.flush()
            if not outbox.done():
                await process.outbox.drain()
            membership.cancel()
            await process.membership.leave()
    except TimeoutError:
        log.warning("%s: gave up winding down after %d s", process.router_id, _WIND_UP_S)
    for task in (outbox, membership):  # not the others again: they may be closing connections
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await process.producer.stop()
