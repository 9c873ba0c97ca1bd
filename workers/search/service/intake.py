"""Takes retrievals from the log and gives hits back; what the Faust agents hand their events to.

A retrieval is acknowledged when the broker has acknowledged its hits, and after all earlier ones of
its partition; whoever takes the partition next answers the rest again, and the asker keeps the
first answer.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from schemas.codec import Codec
from schemas.errors import RecordError, RecordTooLarge
from schemas.log.cancellation import cancel_and_wait
from schemas.log.clients import Ack, LogProducer, send_dead_letter
from schemas.log.faust.app import consumer_record
from schemas.log.faust.group import Group
from schemas.log.faust.start_offsets import commit_start_offsets
from schemas.records import Hits, RetrievalRequest
from schemas.rules.sizes import check_size
from schemas.settings import LogSettings
from schemas.topics import check_record
from workers.search.index.kinds import SearchKind
from workers.search.service.responder import Responder
from workers.search.service.settings import ShardPlace

TOPICS = {"retrieval.prefill": SearchKind.PREFILL, "retrieval.decode": SearchKind.DECODE}


class TimeWeightedMean:
    """The mean over time of a number that changes now and then."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._began_s = self._since_s = clock_s()
        self._value, self._sum = 0, 0.0

    def set_value(self, value: int) -> None:
        """Set the number's value from now on."""
        at_s = self._clock_s()
        self._sum += self._value * (at_s - self._since_s)
        self._value, self._since_s = value, at_s

    def take_mean(self) -> float:
        """The mean since the last call."""
        self.set_value(self._value)
        mean = self._sum / max(1e-9, self._since_s - self._began_s)
        self._began_s, self._sum = self._since_s, 0.0
        return mean


class RetrievalIntake:
    """Retrievals under way; bounded, so that the rest waits in the log."""

    def __init__(
        self,
        settings: LogSettings,
        codec: Codec,
        producer: LogProducer,
        responder: Responder,
        pending_max: int,
    ) -> None:
        self._settings = settings
        self._codec = codec
        self._producer = producer
        self._responder = responder
        self._free_places = asyncio.Semaphore(pending_max)
        self._tasks: set[asyncio.Task[None]] = set()
        self.answering = TimeWeightedMean()  # of retrievals taken that have no hits yet
        self._answering = 0
        self.draining = False
        self.group = Group()

    async def take(self, topic: str, event: Any) -> None:
        """One record, from an agent. While the process ends it is not taken: whoever is next reads
        it again."""
        await self._free_places.acquire()
        if self.draining or self.group.has_failed:
            await asyncio.Event().wait()
        await self.group.guard(self._take(topic, event))

    async def _take(self, topic: str, event: Any) -> None:
        record = consumer_record(event.message)
        partition = (topic, record.partition)
        self.group.next_offsets[partition] = record.offset + 1
        self.group.records_read += 1
        receipt = self.group.receipts.open(partition, event.ack)
        try:
            request = self._decoded(topic, record.value)
        except RecordError as error:
            await send_dead_letter(self._producer, record, error)
            receipt.settle()
            self._free_places.release()
            return

        async def answer() -> None:
            hits = await self._responder.hits(request, TOPICS[topic])
            self._count(-1)  # what waits for the broker alone takes no place
            try:
                ack = await self._send(request, hits)
            except RecordTooLarge as error:
                ack = await self._send(request, self._responder.refused(request, error))
            await ack
            receipt.settle()

        task = asyncio.create_task(answer())
        self._tasks.add(task)
        self._count(1)
        task.add_done_callback(self._answered)

    def _count(self, delta: int) -> None:
        self._answering += delta
        self.answering.set_value(self._answering)

    async def _send(self, request: RetrievalRequest, hits: Hits) -> Ack:
        key = request.request_id or request.retrieval_id
        return await self._producer.send("hits", hits, key=key, partition=request.reply_partition)

    def _answered(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._free_places.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            self.group.fail(error)

    def _decoded(self, topic: str, value: bytes | None) -> RetrievalRequest:
        request = self._codec.decode(value)
        check_record(topic, request)
        assert isinstance(request, RetrievalRequest)
        check_size(request, len(value or b""))
        count = self._settings.asker_partitions
        if not 0 <= request.reply_partition < count:
            raise RecordError(
                f"{topic}: expected a reply_partition below {count}, "
                f"found {request.reply_partition}"
            )
        if len(request.vector) % 4:
            raise RecordError(
                f"{topic}: expected a vector of float32, found {len(request.vector)} bytes"
            )
        return request

    async def drain(self) -> None:
        """Take no more, and wait for what is under way."""
        self.draining = True
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Give up what is under way."""
        await cancel_and_wait(*self._tasks)


def group_id(log_settings: LogSettings, place: ShardPlace) -> str:
    """The name of the consumer group of a shard's replicas."""
    return f"{log_settings.topic_prefix}retrieval-{place.shard}of{place.shards}"


async def begin_group(log_settings: LogSettings, place: ShardPlace) -> None:
    """Give a new group its offsets; one that has some keeps them. Raises BrokerUnavailable."""
    await commit_start_offsets(log_settings, group_id(log_settings, place), tuple(TOPICS))
