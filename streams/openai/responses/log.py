"""Topics `responses` and `responses.deleted`: calls of /v1/responses, for every gateway.

A record is found by its offset, which is in the response's id. A deleted record gets a tombstone,
so that compaction removes it. Until then, every gateway knows the deletion from the second topic,
which it reads whole.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol

from aiokafka.errors import KafkaError

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, NotFound, RecordError, TopicError
from schemas.records import ResponseDeleted, StoredResponse
from schemas.settings import LogSettings
from schemas.topics import TOPICS
from streams.calls.ids import RESPONSE_PREFIX
from streams.log.clients import Ack, AssignedReader, LogProducer
from streams.log.clock import wall_ms
from streams.log.retry import TRANSIENT_ERRORS, retry_forever
from streams.log.slices import in_slices
from streams.log.topic_follower import TopicFollower
from streams.openai.responses.response_id import RecordPosition

logger = logging.getLogger(__name__)
TOPIC, DELETED = "responses", "responses.deleted"
DELETED_MAX = 262_144  # remembered ids; the oldest are dropped
_TROUBLE = (*TRANSIENT_ERRORS, TopicError)
RETENTION_H = TOPICS[TOPIC].retention_ms // 3_600_000


class ResponseStore(Protocol):
    """The storage of calls of /v1/responses."""

    async def put(self, record: StoredResponse) -> RecordPosition:
        """Store a record and return its position; raises BrokerUnavailable, RecordTooLarge."""

    async def get(self, request_id: str, place: RecordPosition) -> StoredResponse:
        """Return the record at a position; raises NotFound, BrokerUnavailable."""

    async def delete(self, record: StoredResponse) -> None:
        """Delete a record for all gateways; raises BrokerUnavailable."""


class ResponseTopic:
    """The storage on the log, as one gateway uses it."""

    def __init__(
        self,
        log: LogSettings,
        codec: Codec,
        *,
        gateway_id: str,
        accept_ms: int,
        producer: Callable[[], LogProducer | None],
    ) -> None:
        """Set up the storage. `producer` is called each time; while the log is away, it returns
        None."""
        self._log = log
        self._codec = codec
        self._gateway_id = gateway_id
        self._accept_ms = accept_ms
        self._producer = producer
        self._deleted: OrderedDict[str, None] = OrderedDict()
        self._follower = TopicFollower(DELETED, wait_ms=accept_ms)

    async def put(self, record: StoredResponse) -> RecordPosition:
        producer, key = self._writer(), record.request_id
        partition = producer.session_partition(record.session_id)
        written = await self._await_ack(producer.send(TOPIC, record, key=key, partition=partition))
        return RecordPosition(partition, written.offset)

    async def delete(self, record: StoredResponse) -> None:
        producer, key = self._writer(), record.request_id
        deletion = ResponseDeleted(request_id=key, at_ms=wall_ms())
        await self._await_ack(producer.send(DELETED, deletion, key=key, partition=0))
        self._note(key)
        partition = producer.session_partition(record.session_id)
        full_topic = self._log.topic_prefix + TOPIC
        await self._await_ack(
            producer.send_raw(full_topic, None, key=key.encode(), partition=partition)
        )

    def _writer(self) -> LogProducer:
        producer = self._producer()
        if producer is None:
            raise BrokerUnavailable("responses: the log cannot be written; try again later")
        return producer

    async def _await_ack(self, sending: Coroutine[Any, Any, Ack]) -> Any:
        """Return the broker's acknowledgement of a record; raises BrokerUnavailable without one."""
        try:
            async with asyncio.timeout(self._accept_ms / 1000):
                return await (await sending)
        except (TimeoutError, KafkaError) as error:
            raise BrokerUnavailable(
                f"responses: not acknowledged within {self._accept_ms} ms: {type(error).__name__}"
            ) from error

    async def get(self, request_id: str, place: RecordPosition) -> StoredResponse:
        not_found = NotFound(
            f"response {RESPONSE_PREFIX}{request_id}: deleted, or older than what the log keeps "
            f"({RETENTION_H} h)"
        )
        if place.partition >= self._log.session_partitions:
            raise not_found
        try:
            async with asyncio.timeout(self._accept_ms / 1000):
                await self._follower.catch_up()
                if request_id in self._deleted:
                    raise not_found
                value = await self._read(place)
        except (TimeoutError, KafkaError) as error:
            raise BrokerUnavailable(f"responses: not read: {type(error).__name__}") from error
        record = None if value is None else self._codec.decode(value)
        if not isinstance(record, StoredResponse) or record.request_id != request_id:
            raise not_found
        return record

    async def _read(self, place: RecordPosition) -> bytes | None:
        """Return the bytes at a position, or those of the next record if compaction removed it."""
        client_id = f"{self._gateway_id}-responses"
        reader = AssignedReader(self._log, TOPIC, [place.partition], client_id=client_id)
        async with reader.reading("nowhere"):
            if (await reader.end_offsets())[place.partition] <= place.offset:
                return None
            await reader.seek({place.partition: place.offset})
            for record in await reader.batch(max_records=1, timeout_ms=self._accept_ms):
                value: bytes | None = record.value
                return value
        return None

    async def follow(self) -> None:
        """Follow the deletions of all gateways until cancelled; retry after every failure of the
        log."""
        await retry_forever(self._follow, DELETED, logger, errors=_TROUBLE)

    async def _follow(self) -> None:
        client_id = f"{self._gateway_id}-deleted"
        reader = AssignedReader(self._log, DELETED, [0], client_id=client_id)
        async with reader.reading("earliest"):
            async with aclosing(self._follower.follow(reader)) as batches:
                async for records in batches:
                    async for record in in_slices(records):
                        self.note(record.value)

    def note(self, value: bytes) -> None:
        """Apply a record of the second topic; other records are ignored."""
        try:
            record = self._codec.decode(value)
        except RecordError as error:
            logger.error("%s: %s", DELETED, error)
            return
        if isinstance(record, ResponseDeleted):
            self._note(record.request_id)

    def _note(self, request_id: str) -> None:
        self._deleted[request_id] = None
        if len(self._deleted) > DELETED_MAX:
            self._deleted.popitem(last=False)
