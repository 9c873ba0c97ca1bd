"""The partitions that a router owns: rebuilds them, opens their gate, gives them up.

The core decides what a record means; `streams/agents/takeover.py` reads the past records. Faust
calls `OwnedPartitions` at each rebalance, and passes new records to `RouterProcess`.
"""

import asyncio
import logging
from contextlib import aclosing

from aiokafka import ConsumerRecord

from schemas.errors import RecordError
from schemas.records import (
    MemberState,
)
from streams.agents.app import TOPICS
from streams.agents.router import RouterProcess
from streams.agents.takeover import past_records
from streams.core.events import (
    OutcomeArrived,
    PartitionLost,
    PartitionReady,
    PartitionTaken,
    RequestArrived,
    UsageLoaded,
)
from streams.journal.journal import PASSED_OVER
from streams.log.cancellation import cancel_and_wait
from streams.log.clock import wall_ms
from streams.log.faust.group import Place
from streams.log.slices import in_slices

log = logging.getLogger(__name__)


class OwnedPartitions:
    """A router's partitions, from their assignment by Faust to their loss."""

    def __init__(self, process: RouterProcess) -> None:
        self.process = process
        self.group = process.group
        self.gate = process.gate
        self._takeover: asyncio.Task[None] | None = None

    def marks(self) -> dict[int, int]:
        """Return the mark of each rebuilt partition: the offset of its oldest live request."""
        rebuilt = self.process.router.rebuilt
        return self.process.marks.oldest(
            {p: self.group.next_offsets["requests", p] for p in rebuilt}
        )

    # Ownership

    def on_assigned(self, places: set[Place]) -> None:
        """Take the partitions that Faust has assigned: rebuild them, then open the gate."""
        partitions, owned = {partition for _, partition in places}, self.process.router.owned
        self.group.on_assigned(places)
        self.gate.keep(partitions)
        self._give_up(owned - partitions)
        new_partitions = sorted(partitions - owned)
        for partition in new_partitions:
            self.process.apply(PartitionTaken(partition), "taken", partition, 0)
            for topic in TOPICS:  # the rebuild sets the offsets that it reached
                self.group.next_offsets.setdefault((topic, partition), 0)
        self._takeover = asyncio.create_task(self._take_over(new_partitions))
        self._takeover.add_done_callback(self._check_takeover)

    def _check_takeover(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.group.fail(error)

    async def _take_over(self, partitions: list[int]) -> None:
        process = self.process
        requests: list[tuple[int, int, str]] = []
        await process.usage.keep(process.router.owned)
        if partitions:
            started_ms, before = wall_ms(), self.group.records_read
            await process.usage.take(partitions)
            requests = await self._rebuild(partitions)
            await process.usage.begin(partitions, self.group.next_offsets)
            log.info(
                "%s: rebuilt partitions %s from %d records in %d ms",
                *(process.router_id, partitions, self.group.records_read - before),
                wall_ms() - started_ms,
            )
        process.membership.set_state(MemberState.READY)
        for partition in partitions:
            effects = process.apply(PartitionReady(partition), "ready", partition, 0)
            process.outbox.put(effects)
            self.gate.open(partition)
        for partition, offset, request_id in requests:
            if process.is_live(request_id):
                self.process.marks.add(partition, offset, request_id)

    async def _rebuild(self, partitions: list[int]) -> list[tuple[int, int, str]]:
        """Apply the past records; return partition, offset and id of the requests among them."""
        process, requests = self.process, list[tuple[int, int, str]]()
        conversations: dict[tuple[int, bytes | None], ConsumerRecord] = {}
        history = past_records(
            process.log,
            partitions,
            session_ttl_ms=process.settings.session_ttl_ms,
            client_id=f"{process.router_id}-takeover",
            next_offsets=self.group.next_offsets,
        )
        async with aclosing(history) as records:
            async for topic, record in records:
                self.group.records_read += 1
                if topic == "sessions":  # compacted: only the last record of a key counts
                    conversations[record.partition, record.key] = record
                else:
                    self._apply_past(topic, record, requests)
        async for record in in_slices(conversations.values()):
            self._apply_past("sessions", record, requests)
        return requests

    def _apply_past(
        self, topic: str, record: ConsumerRecord, requests: list[tuple[int, int, str]]
    ) -> None:
        """Apply one record of a rebuild; append requests to the list."""
        if record.value is None:
            return
        try:
            event = self.process.decode(topic, record)
        except RecordError:  # Faust delivers it again if it is not dead-lettered yet
            self.process.unreadable.add((topic, record.partition, record.offset))
            return
        self.process.apply(event, topic, record.partition, record.offset)
        if isinstance(event, OutcomeArrived):
            self._pass_over(event, record)
        elif isinstance(event, RequestArrived):
            requests.append((record.partition, record.offset, event.request.request_id))

    def _pass_over(self, event: OutcomeArrived, record: ConsumerRecord) -> None:
        """Write no usage for an outcome from before usage was written."""
        if self.process.usage.is_older(record.partition, record.offset):
            usage_event = UsageLoaded(event.outcome.request_id, record.partition)
            self.process.apply(usage_event, PASSED_OVER, record.partition, record.offset)

    async def on_revoked(self) -> None:
        """Give up all partitions. When this returns, all decisions are in the log, so that the next
        owners read them."""
        self.gate.close()
        self._give_up(self.process.router.owned)
        self.process.unreadable.clear()
        self.group.on_revoked()
        self.process.flush()
        await self.stop_takeover()
        self.process.usage.hurry()
        await self.process.outbox.drain()
        await self.process.usage.keep(())

    async def stop_takeover(self) -> None:
        """Cancel an active rebuild, and wait until its readers are closed."""
        if self._takeover is not None:
            await cancel_and_wait(self._takeover)

    def _give_up(self, partitions: set[int]) -> None:
        for partition in sorted(partitions):
            effects = self.process.apply(PartitionLost(partition), "lost", partition, 0)
            self.process.outbox.put(effects)
            self.process.marks.forget(partition)
            for topic in TOPICS:
                self.group.next_offsets.pop((topic, partition), None)
