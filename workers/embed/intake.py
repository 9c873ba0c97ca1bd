"""Takes what the Faust agents hand over, and has it done by `documents.py` and `queries.py`.

A record is acknowledged when the broker has what follows from it, and after all earlier ones of its
partition. What cannot be used goes to the dead letters of its topic, and the rest goes on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiokafka import ConsumerRecord

from schemas.errors import EngineFailed, RecordError
from schemas.log.clients import LogProducer, bury
from schemas.log.endings import ended
from schemas.log.faust.app import consumer_record
from schemas.log.faust.group import Group
from schemas.log.faust.receipts import Receipt

Handle = Callable[[ConsumerRecord], Awaitable[None]]


class Intake:
    """Records under way, of each topic at most so many; the rest waits in the log."""

    def __init__(
        self,
        producer: LogProducer,
        handles: Mapping[str, Handle],
        under_way_max: Mapping[str, int],
    ) -> None:
        self._producer = producer
        self._handles = handles
        self._rooms = {topic: asyncio.Semaphore(under_way_max[topic]) for topic in handles}
        self._tasks: dict[str, set[asyncio.Task[None]]] = {topic: set() for topic in handles}
        self.draining = False
        self.group = Group()

    async def take(self, topic: str, event: Any) -> None:
        """One record, from an agent. While the process ends it is not taken: whoever is next reads
        it again."""
        await self._rooms[topic].acquire()
        if self.draining or self.group.has_failed:
            await asyncio.Event().wait()
        record = consumer_record(event.message)
        place = (topic, record.partition)
        self.group.next_offsets[place] = record.offset + 1
        self.group.records_read += 1
        receipt = self.group.receipts.open(place, event.ack)
        task = asyncio.create_task(self._done(topic, record, receipt))
        self._tasks[topic].add(task)

        def ended(task: "asyncio.Task[None]") -> None:
            self._tasks[topic].discard(task)
            self._rooms[topic].release()
            if not task.cancelled() and (error := task.exception()) is not None:
                self.group.fail(error)

        task.add_done_callback(ended)

    async def _done(self, topic: str, record: ConsumerRecord, receipt: Receipt) -> None:
        try:
            await self._handles[topic](record)
        except (RecordError, EngineFailed) as error:
            await bury(self._producer, record, error)
        receipt.settle()

    async def drain(self) -> None:
        """Take no more, and wait for what is under way."""
        self.draining = True
        if under_way := self._all():
            await asyncio.wait(under_way)

    async def cancel(self, *topics: str) -> None:
        """Give up what is under way of these topics, or of all."""
        await ended(*self._all(*topics))

    def _all(self, *topics: str) -> list[asyncio.Task[None]]:
        chosen = topics or tuple(self._tasks)
        return [task for topic in chosen for task in self._tasks[topic]]
