"""Passes records from the Faust agents to `documents.py` and `queries.py`, and acknowledges them.

A record is acknowledged when the broker has its output, and after all earlier records of its
partition. A record that cannot be used goes to the dead-letter topic; the others continue. A record
on which a worker crashed is processed alone; after `CRASHES_MAX` crashes it goes to the dead-letter
topic (`streams/log/faust/crash_notes.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiokafka import ConsumerRecord

from schemas.errors import EngineFailed, RecordError
from streams.log.cancellation import cancel_and_wait
from streams.log.clients import LogProducer, send_dead_letter
from streams.log.faust.app import consumer_record
from streams.log.faust.crash_notes import CRASHES_MAX, CrashNotes, crash_error
from streams.log.faust.group import Group, Receipt

Handle = Callable[[ConsumerRecord], Awaitable[None]]


class EmbeddingIntake:
    """The records in flight, at most `in_flight_max` of each topic; the rest waits in the log."""

    def __init__(
        self,
        producer: LogProducer,
        handles: Mapping[str, Handle],
        in_flight_max: Mapping[str, int],
        falls: CrashNotes,
    ) -> None:
        self._producer = producer
        self._handles = handles
        self._slots = {topic: asyncio.Semaphore(in_flight_max[topic]) for topic in handles}
        self._tasks: dict[str, set[asyncio.Task[None]]] = {topic: set() for topic in handles}
        self._falls = falls
        self._turn = asyncio.Lock()  # locked while a record is taken, or processed alone
        self.draining = False
        self.group = Group()

    async def take(self, topic: str, event: Any) -> None:
        """Take one record from an agent. During a drain it is left to the partition's next
        worker: the call does not return."""
        with self.group.while_full():
            await self._slots[topic].acquire()
            await self._turn.acquire()
        try:
            if self.draining or self.group.has_failed:
                await asyncio.Event().wait()
            await self.group.guard(self._take(topic, event))
        finally:
            self._turn.release()

    async def _take(self, topic: str, event: Any) -> None:
        record = consumer_record(event.message)
        place = (topic, record.partition)
        self.group.next_offsets[place] = record.offset + 1
        self.group.records_read += 1
        receipt = self.group.receipts.open(place, event.ack)
        falls = await self._falls.begin(place, record.offset)
        if falls and (running_tasks := self._all()):
            with self.group.while_full():
                await asyncio.wait(running_tasks)
        task = asyncio.create_task(self._process(topic, record, receipt, falls))
        self._tasks[topic].add(task)

        def on_task_done(task: "asyncio.Task[None]") -> None:
            self._tasks[topic].discard(task)
            self._slots[topic].release()
            if not task.cancelled() and (error := task.exception()) is not None:
                self.group.fail(error)

        task.add_done_callback(on_task_done)
        if falls:
            with self.group.while_full():
                await asyncio.wait([task])

    async def _process(
        self, topic: str, record: ConsumerRecord, receipt: Receipt, falls: int
    ) -> None:
        try:
            if falls >= CRASHES_MAX:
                raise crash_error(falls)
            await self._handles[topic](record)
        except (RecordError, EngineFailed) as error:
            await send_dead_letter(self._producer, record, error)
        self._falls.end((topic, record.partition), record.offset)
        receipt.settle()

    async def drain(self) -> None:
        """Take no more records, and wait for those in flight."""
        self.draining = True
        if under_way := self._all():
            await asyncio.wait(under_way)

    async def cancel(self, *topics: str) -> None:
        """Cancel the records in flight of these topics, or of all topics."""
        await cancel_and_wait(*self._all(*topics))

    def _all(self, *topics: str) -> list[asyncio.Task[None]]:
        chosen = topics or tuple(self._tasks)
        return [task for topic in chosen for task in self._tasks[topic]]
