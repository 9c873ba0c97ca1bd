"""Topics `objects` and `files`: the objects that callers store, for every gateway.

Each gateway reads `objects` whole into a table, and follows it. A writer waits until its own table
has the record. Before a call is answered, the table catches up with the writes of other gateways,
so callers can read at any gateway what they wrote at another. Bytes of files are read from `files`
when a call needs them, and are not cached.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Protocol, Self

from aiokafka import ConsumerRecord
from aiokafka.errors import KafkaError

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, NotReady, RecordError, TopicError
from schemas.records import FilePart, StoredFile
from schemas.settings import LogSettings
from schemas.topics import check_record, partition_of
from streams.calls.config import GatewaySettings
from streams.calls.log.sender import LogSender
from streams.log.clients import AssignedReader, LogProducer
from streams.log.retry import TRANSIENT_ERRORS, retry_forever
from streams.log.slices import in_slices
from streams.log.topic_follower import TopicFollower
from streams.openai.objects.quota import Quota
from streams.openai.objects.table import ObjectRecord, ObjectTable, key_of

logger = logging.getLogger(__name__)
PART_BYTES = 1 << 20
BATCH_MAX = 2_000  # records per batch; other tasks run between batches
_TROUBLE = (*TRANSIENT_ERRORS, TopicError)


class Objects(Protocol):
    """The storage of callers' objects, as endpoints use it."""

    @property
    def table(self) -> ObjectTable:
        """Return the table of all objects; raises NotReady while it is not read."""

    async def catch_up(self) -> None:
        """Wait until the table has all records that any gateway wrote before this call.

        Raises NotReady and BrokerUnavailable.
        """

    def partition(self, file_id: str) -> int:
        """Return the partition of `files` that holds all parts of a file."""

    async def put(self, *records: ObjectRecord) -> None:
        """Write records, and wait until the table has them; raises BrokerUnavailable,
        TooManyRequests."""

    async def drop(self, *keys: str) -> None:
        """Delete the records under these keys, and wait likewise; raises BrokerUnavailable."""

    async def write_parts(self, file: StoredFile, parts: AsyncIterator[bytes]) -> list[int]:
        """Write a file's bytes to its partition; return the offsets."""

    def read_parts(self, file: StoredFile) -> AsyncIterator[bytes]:
        """Yield a file's bytes; raises BrokerUnavailable if the log cannot deliver them."""


class ObjectLog:
    """The storage on the log; `read` follows it until cancelled."""

    def __init__(
        self,
        log: LogSettings,
        codec: Codec,
        *,
        gateway_id: str,
        quota: Quota,
        wait_ms: int,
        producer: Callable[[], LogProducer | None],
        bury: Callable[[ConsumerRecord, RecordError], Awaitable[None]],
    ) -> None:
        """Set up the storage. `producer` is called each time; while the log is away, it returns
        None."""
        self._log, self._codec = log, codec
        self._client_id = f"{gateway_id}-objects"
        self._quota, self._wait_s = quota, wait_ms / 1000
        self._producer, self._bury = producer, bury
        self._table: ObjectTable | None = None
        self._follower = TopicFollower("objects", wait_ms=wait_ms)

    @classmethod
    def build(
        cls,
        log: LogSettings,
        codec: Codec,
        settings: GatewaySettings,
        sender: LogSender,
        gateway_id: str,
    ) -> Self:
        """Build the storage within the limits of the settings."""
        quota = Quota(
            objects_max=settings.objects_max,
            bytes_max=settings.files_bytes_max,
            tenants=settings.tenants,
            tenant_objects_max=settings.tenant_objects_max,
            tenant_bytes_max=settings.tenant_files_bytes_max,
        )
        return cls(
            log,
            codec,
            gateway_id=gateway_id,
            quota=quota,
            wait_ms=settings.accept_ms,
            producer=sender.started,
            bury=sender.bury,
        )

    @property
    def is_read(self) -> bool:
        """Return whether the table has been read."""
        return self._table is not None

    @property
    def table(self) -> ObjectTable:
        if self._table is None:
            raise NotReady("this gateway is still reading what was kept; try again")
        return self._table

    @property
    def news(self) -> asyncio.Condition:
        """Return the condition that is notified when the table has changed."""
        return self._follower.news

    async def catch_up(self) -> None:
        self.table  # noqa: B018  # raises if there is none
        self.require_producer()
        await self._follower.catch_up()

    def partition(self, file_id: str) -> int:
        """Return the partition of `files` that holds all parts of a file."""
        return partition_of(file_id, self._log.document_partitions)

    async def put(self, *records: ObjectRecord) -> None:
        self._quota.check(self.table, records)
        await self._write([(key_of(record), record) for record in records])

    async def drop(self, *keys: str) -> None:
        await self._write([(key, None) for key in keys])

    async def _write(self, pairs: list[tuple[str, ObjectRecord | None]]) -> None:
        producer, topic = self.require_producer(), self._log.topic_prefix + "objects"
        try:
            async with asyncio.timeout(self._wait_s):
                acks = [
                    await producer.send("objects", record, key=key, partition=0)
                    if record is not None
                    else await producer.send_raw(topic, None, key=key.encode(), partition=0)
                    for key, record in pairs
                ]
                last = max([(await ack).offset for ack in acks], default=-1)
                await self._follower.reach({0: last + 1})
        except (TimeoutError, KafkaError) as error:
            raise BrokerUnavailable(
                f"objects: not acknowledged and read again in {self._wait_s:g} s: "
                f"{type(error).__name__}; try again"
            ) from error

    def require_producer(self) -> LogProducer:
        """Return the producer; raises BrokerUnavailable if there is none."""
        if (producer := self._producer()) is None:
            raise BrokerUnavailable("the log cannot be written; is the broker away?")
        return producer

    # The bytes of files

    async def write_parts(self, file: StoredFile, parts: AsyncIterator[bytes]) -> list[int]:
        producer, offsets = self.require_producer(), list[int]()
        try:
            async for data in parts:
                part = FilePart(file_id=file.file_id, number=len(offsets), data=data)
                key = part_key(file.file_id, part.number)
                async with asyncio.timeout(self._wait_s):
                    ack = await producer.send("files", part, key=key, partition=file.partition)
                    offsets.append((await ack).offset)
        except (TimeoutError, KafkaError) as error:
            raise BrokerUnavailable(f"files: not acknowledged: {type(error).__name__}") from error
        return offsets

    async def drop_parts(self, file: StoredFile) -> None:
        """Delete the bytes of a file, also those of an unfinished upload."""
        producer, topic = self.require_producer(), self._log.topic_prefix + "files"
        for number in range(len(file.parts)):
            key = part_key(file.file_id, number).encode()
            ack = await producer.send_raw(topic, None, key=key, partition=file.partition)
            await ack

    async def read_parts(self, file: StoredFile) -> AsyncIterator[bytes]:
        reader = AssignedReader(self._log, "files", [file.partition], client_id=self._client_id)
        offsets = list(file.parts)
        try:
            async with reader.reading({file.partition: offsets[0]} if offsets else "nowhere"):
                while offsets:
                    async with asyncio.timeout(self._wait_s):
                        records = await reader.batch(max_records=16)
                    for record in records:
                        if offsets and record.offset >= offsets[0]:
                            yield self._data(record, file, offsets.pop(0))
        except (TimeoutError, *_TROUBLE) as error:
            raise BrokerUnavailable(
                f"{file.file_id}: its bytes cannot be read: {type(error).__name__}: {error}"
            ) from error

    def _data(self, record: ConsumerRecord, file: StoredFile, offset: int) -> bytes:
        part = self._codec.decode(record.value) if record.value else None
        if record.offset != offset or not isinstance(part, FilePart):
            raise RecordError(f"files[{record.partition}]: no part at {offset}")
        if part.file_id != file.file_id:
            raise RecordError(f"files[{record.partition}]@{offset}: a part of another file")
        return part.data

    # The table that every gateway reads

    async def read(self) -> None:
        """Follow the topic until cancelled; retry after every failure of the log."""
        await retry_forever(self._read_topic, "objects", logger, errors=_TROUBLE)

    async def _read_topic(self) -> None:
        """Read the whole topic into a new table, then follow it. An old table may have objects
        whose deletion is no longer on the topic."""
        table = ObjectTable()
        reader = AssignedReader(
            self._log, "objects", [0], client_id=self._client_id, committed_only=True
        )
        async with reader.reading("earliest"):
            async for records in reader.until(await reader.end_offsets()):
                await self._fold(table, records)
            self._table = table
            async with aclosing(self._follower.follow(reader, max_records=BATCH_MAX)) as batches:
                async for records in batches:
                    await self._fold(table, records)

    async def _fold(self, table: ObjectTable, records: list[ConsumerRecord]) -> None:
        async for record in in_slices(records):
            try:
                stored_object = self._codec.decode(record.value) if record.value else None
                if stored_object is not None:
                    check_record("objects", stored_object)
                table.apply((record.key or b"").decode(errors="replace"), stored_object)
            except RecordError as error:
                await self._bury(record, error)


def part_key(file_id: str, number: int) -> str:
    """Build the key of a part on `files`."""
    return f"{file_id}/{number}"
