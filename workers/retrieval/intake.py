"""Takes retrievals from the Faust agents and sends their hits.

A retrieval is acknowledged when the broker has acknowledged its hits, and after all earlier ones of
its partition. The next worker of the partition answers the others again, and the requester keeps
the first answer.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from schemas.codec import Codec
from schemas.errors import RecordError, RecordTooLarge
from schemas.records import Hits, RetrievalRequest
from schemas.rules.sizes import check_size
from schemas.settings import LogSettings
from schemas.topics import check_record
from streams.log.cancellation import cancel_and_wait
from streams.log.clients import Ack, LogProducer, send_dead_letter
from streams.log.faust.app import consumer_record
from streams.log.faust.group import Group, commit_start_offsets
from workers.retrieval.responder import Responder
from workers.retrieval.settings import ShardPlace
from workers.vector.index.kinds import SearchKind

TOPICS = {"retrieval.prefill": SearchKind.PREFILL, "retrieval.decode": SearchKind.DECODE}


class TimeWeightedMean:
    """The mean over time of a number that changes at arbitrary moments."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._began_s = self._since_s = clock_s()
        self._value, self._sum = 0, 0.0

    def set_value(self, value: int) -> None:
        """Set the number that holds from now on."""
        at_s = self._clock_s()
        self._sum += self._value * (at_s - self._since_s)
        self._value, self._since_s = value, at_s

    def take_mean(self) -> float:
        """Return the mean since the last call."""
        self.set_value(self._value)
        mean = self._sum / max(1e-9, self._since_s - self._began_s)
        self._began_s, self._sum = self._since_s, 0.0
        return mean


class RetrievalIntake:
    """The retrievals in flight, at most `pending_max`; the rest waits in the log."""

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
        self.answering = TimeWeightedMean()  # number of retrievals taken that have no hits yet
        self._answering = 0
        self.draining = False
        self.group = Group()

    async def take(self, topic: str, event: Any) -> None:
        """Take one record from an agent. During a drain it is left to the partition's next
        worker: the call does not return."""
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
            self._count(-1)  # a retrieval that only waits for the broker is not counted
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
        """Take no more retrievals, and wait for those in flight."""
        self.draining = True
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancel the retrievals in flight, and wait for their tasks."""
        await cancel_and_wait(*self._tasks)


def group_id(log_settings: LogSettings, place: ShardPlace) -> str:
    """Return the name of the consumer group of a shard's replicas."""
    return f"{log_settings.topic_prefix}retrieval-{place.shard}of{place.shards}"


async def begin_group(log_settings: LogSettings, place: ShardPlace) -> None:
    """Commit a new group's first offsets; an existing group keeps its own.

    Raises BrokerUnavailable."""
    await commit_start_offsets(log_settings, group_id(log_settings, place), tuple(TOPICS))
