"""The clients by which every process writes to and reads from the log: a producer and a reader.

Every aiokafka setting that Trivium uses on a hot path is set here, once. There are no consumer
groups: readers are assigned their partitions, because a rebalance must not come between a dispatch
and its worker. Faust agents are the one exception (`streams/log/faust`).
"""

import asyncio
import contextlib
import heapq
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from itertools import count
from typing import Any, Literal, Self

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError, MessageSizeTooLargeError

from schemas.codec import Codec, why_unreadable
from schemas.errors import BrokerUnavailable, RecordTooLarge, TopicError, TriviumError, clip_message
from schemas.rules.sizes import RECORD_BYTES_MAX, check_size
from schemas.settings import LogSettings
from schemas.topics import DEAD_LETTER_HEADERS, DEAD_LETTER_SUFFIX, check_record, partition_of
from streams.log import connecting
from streams.log.reading.faults import FAULTS
from streams.log.reading.fetching import LONGEST_MS, LOOK_MS, prepare_fetches

_HELD_MAX = 5_000  # buffered records above which a partition is not read, in `by_time`
_FETCH_MS = 500  # shortest wait of a fetch at the broker
# Transaction markers at a partition's end are no records: only the position passes them.
MARKS_MS, MARKS_MAX_MS = 5, 100
Headers = Sequence[tuple[str, bytes]]
Ack = asyncio.Future[Any]
ReadFrom = Literal["earliest", "latest", "nowhere"] | dict[int, int]  # or the offsets by partition


class LogProducer:
    """Writes records to the topics of the table.

    `durable` is idempotent and carries CloudEvents attributes in binary mode; the other one, for
    token frames, does neither. Both wait for all in-sync replicas if there are several. With one
    replica, the latter waits for the leader only, so ends of answers need a `durable` producer.
    """

    def __init__(
        self, settings: LogSettings, codec: Codec, *, durable: bool, client_id: str
    ) -> None:
        self._settings = settings
        self._codec = codec
        self._durable = durable
        self._client_id = client_id
        self._event_ids = count()
        self._producer: AIOKafkaProducer | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Connect to the brokers. Raise BrokerUnavailable if none answers."""
        producer = AIOKafkaProducer(
            **connecting.client_options(self._settings),
            client_id=self._client_id,
            acks="all" if self._durable or self._settings.replication_factor > 1 else 1,
            enable_idempotence=self._durable,
            linger_ms=0,
            max_batch_size=1 << 18,
            max_request_size=RECORD_BYTES_MAX,
        )
        try:
            await connecting.start_client(producer.start, producer.stop)
        except KafkaError as error:
            raise connecting.no_broker(self._settings.bootstrap, error) from error
        self._producer = producer

    async def stop(self) -> None:
        """Flush and close; drop records that no broker accepts within `request_timeout_ms`."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await connecting.close_producer(producer, self._settings.request_timeout_ms / 1000)

    async def discard(self) -> None:
        """Close without a flush: buffered records belong to an incarnation that is over.

        A request in flight may still arrive; its readers see on the fleet topic that its writer's
        epoch is over.
        """
        producer, self._producer = self._producer, None
        if producer is not None:
            producer._closed = True  # noqa: SLF001  # aiokafka only offers to flush first
            await connecting.abort_producer(producer)

    def session_partition(self, session_id: str) -> int:
        """Return the partition of all records about a session."""
        return partition_of(session_id, self._settings.session_partitions)

    async def send(
        self, topic: str, record: Any, *, key: str, partition: int, headers: Headers = ()
    ) -> Ack:
        """Buffer a record; await the returned future for the broker's acknowledgement.

        Raises RecordTooLarge if it breaks the size rule, BrokerUnavailable if the client cannot
        take it.
        """
        check_record(topic, record)
        value = self._codec.encode(record)
        check_size(record, len(value))
        if self._durable:
            kind, event_id = type(record).__name__, str(next(self._event_ids))
            headers = [*headers, *event_headers(kind, self._client_id, event_id)]
        return await self.send_raw(
            self._settings.topic_prefix + topic,
            value,
            key=key.encode(),
            partition=partition,
            headers=headers,
        )

    async def send_raw(
        self,
        full_topic: str,
        value: bytes | None,
        *,
        key: bytes | None,
        partition: int,
        headers: Headers = (),
    ) -> Ack:
        """Buffer bytes as `send` does, for records outside the topic table (dead letters)."""
        if self._producer is None:
            raise BrokerUnavailable("the producer is not started")
        try:
            ack: Ack = await self._producer.send(
                full_topic, value, key=key, partition=partition, headers=list(headers)
            )
            return ack
        except MessageSizeTooLargeError as error:
            raise RecordTooLarge(f"{full_topic}[{partition}]: not sent: {error}") from error
        except (KafkaError, AssertionError) as error:  # an assertion: unknown partition
            raise BrokerUnavailable(
                f"{full_topic}[{partition}]: not sent: {type(error).__name__}: {error}"
            ) from error


def event_headers(kind: str, client_id: str, event_id: str) -> Headers:
    """Return CloudEvents attributes in binary mode."""
    return (
        ("content-type", b"application/avro"),
        ("ce_specversion", b"1.0"),
        ("ce_type", f"trivium.{kind}".encode()),
        ("ce_source", f"/trivium/{client_id}".encode()),
        ("ce_id", event_id.encode()),
    )


class AssignedReader:
    """Reads fixed partitions of one topic of the table, without a consumer group.

    With `committed_group` it commits positions every 5 s, only for lag tools. With `committed_only`
    it reads no record of an open transaction, and none behind it until the transaction ends. Each
    fetch asks a broker for at most `fetch_bytes` per partition, or one batch if that is larger.
    """

    def __init__(
        self,
        settings: LogSettings,
        topic: str,
        partitions: Sequence[int],
        *,
        client_id: str,
        committed_group: str | None = None,
        committed_only: bool = False,
        fetch_bytes: int = RECORD_BYTES_MAX,
    ) -> None:
        self.topic = settings.topic_prefix + topic
        self._partitions = [TopicPartition(self.topic, p) for p in partitions]
        self._bootstrap = settings.bootstrap
        self._answer_s = settings.request_timeout_ms / 1000
        self._fetch_ms = min(LONGEST_MS, settings.request_timeout_ms // 2)
        group = settings.topic_prefix + committed_group if committed_group else None
        self._options = {
            **connecting.client_options(settings),
            "client_id": client_id,
            "group_id": group,
            "isolation_level": "read_committed" if committed_only else "read_uncommitted",
            "enable_auto_commit": group is not None,
            "auto_commit_interval_ms": 5_000,
            "auto_offset_reset": "earliest",
            "consumer_timeout_ms": LOOK_MS,
            "max_partition_fetch_bytes": fetch_bytes,
        }
        self._consumer: AIOKafkaConsumer | None = None

    @property
    def _started(self) -> AIOKafkaConsumer:
        if self._consumer is None:
            raise BrokerUnavailable(f"{self.topic}: the reader is not started")
        return self._consumer

    @contextlib.asynccontextmanager
    async def reading(self, at: ReadFrom) -> AsyncIterator[Self]:
        """Start at the given place, and stop at the end of the context."""
        await self.start(at)
        try:
            yield self
        finally:
            await self.stop()

    async def start(self, at: ReadFrom) -> None:
        """Connect and seek to the given place; `latest` is fixed when this returns.

        `nowhere` fetches nothing before `seek`, which would wait for an active fetch.
        """
        consumer = AIOKafkaConsumer(**self._options)
        prepare_fetches(consumer, _FETCH_MS, self._fetch_ms)
        try:
            await connecting.start_client(consumer.start, consumer.stop)
        except KafkaError as error:
            raise connecting.no_broker(self._bootstrap, error) from error
        self._consumer = consumer
        try:
            consumer.assign(self._partitions)
            if at == "earliest":
                await self.seek(await self.first_offsets())
            elif at == "latest":
                await self.seek(await self.end_offsets())
            elif at == "nowhere":
                consumer.pause(*self._partitions)
            else:
                await self.seek(at)
        except BaseException:
            await self.stop()
            raise

    async def seek(self, offsets: dict[int, int]) -> None:
        """Go to the given offset of each given partition."""
        for partition, offset in offsets.items():
            place = TopicPartition(self.topic, partition)
            self._started.seek(place, offset)
            self._started.resume(place)

    async def first_offsets(self) -> dict[int, int]:
        """Return the offset of each partition's first record; raises as `end_offsets`."""
        return await self._bounds(self._started.beginning_offsets)

    async def end_offsets(self) -> dict[int, int]:
        """Return the offset after the last record of each partition.

        Raises TopicError for a missing topic, BrokerUnavailable if no broker answers.
        """
        return await self._bounds(self._started.end_offsets)

    async def _bounds(self, ask: Callable[..., Awaitable[Any]]) -> dict[int, int]:
        consumer = self._started
        try:
            offsets = await ask(self._partitions)
        except KafkaError as error:
            raise await self._read_error(consumer, error) from error
        return {tp.partition: offset for tp, offset in offsets.items()}

    async def reaches(self, offsets: dict[int, int]) -> bool:
        """Return whether the topic has these partitions and offsets; call it before `start`."""
        await self.start("latest")
        try:
            ends = await self.end_offsets()
        finally:
            await self.stop()
        return offsets.keys() == ends.keys() and all(offsets[p] <= end for p, end in ends.items())

    def lag(self, offsets: dict[int, int]) -> int:
        """Return the number of records after these offsets, as of the last fetches."""
        if self._consumer is None:
            return 0
        ends = {tp.partition: self._consumer.highwater(tp) or 0 for tp in self._partitions}
        return sum(max(0, end - offsets.get(partition, 0)) for partition, end in ends.items())

    async def _read_error(self, consumer: AIOKafkaConsumer, error: KafkaError) -> TriviumError:
        """Return the error to raise; aiokafka has one for both a missing topic and no answer."""
        trouble = f"{self.topic}: cannot be read: {type(error).__name__}"
        try:
            async with asyncio.timeout(self._answer_s):
                topics = await consumer.topics()
        except (KafkaError, TimeoutError):
            return BrokerUnavailable(f"{trouble}; no broker answers at {self._bootstrap}")
        if self.topic in topics:
            return BrokerUnavailable(f"{trouble}; its broker is away")
        return TopicError(f"{trouble}; create the topics with `trivium topics create`")

    async def offsets_at(self, timestamp_ms: int) -> dict[int, int]:
        """Return each partition's first offset at or after a time; its end if there is none."""
        ends = await self.end_offsets()  # first, or records that come in between are skipped
        offsets = await self._started.offsets_for_times(
            dict.fromkeys(self._partitions, timestamp_ms)
        )
        return {
            tp.partition: at.offset if at is not None else ends[tp.partition]
            for tp, at in offsets.items()
        }

    async def batch(
        self, *, max_records: int = 500, timeout_ms: int = 60_000
    ) -> list[ConsumerRecord]:
        """Wait for records and return those that have arrived; none only after the timeout."""
        batches = await self._started.getmany(timeout_ms=timeout_ms, max_records=max_records)
        if len(batches) == 1:
            return list(next(iter(batches.values())))
        return [record for records in batches.values() for record in records]

    async def read_to_end(self) -> list[ConsumerRecord]:
        """Return all records between the current position and the end as of this call."""
        ends = await self.end_offsets()
        return [record async for batch in self.until(ends) for record in batch]

    async def until(
        self, ends: dict[int, int], *, max_records: int = 5_000
    ) -> AsyncIterator[list[ConsumerRecord]]:
        """Yield batches until every partition is at its end or beyond; the last may have more."""
        look_ms = MARKS_MS
        while not await self.has_reached(ends):
            yield await self.batch(max_records=max_records, timeout_ms=look_ms)
            look_ms = min(2 * look_ms, MARKS_MAX_MS)

    async def has_reached(self, offsets: Mapping[int, int]) -> bool:
        """Return whether it is at these offsets or beyond: all records before were returned."""
        return all([await self._position(tp) >= offsets[tp.partition] for tp in self._partitions])

    def pause(self) -> None:
        """Pause all partitions until the next `seek`."""
        self._started.pause(*self._partitions)

    async def by_time(self, ends: dict[int, int]) -> AsyncIterator[ConsumerRecord]:
        """Yield records until every partition is at its end or beyond, in order of time.

        Of the partitions' next records it yields the oldest by the log's timestamps, on ties that
        of the lowest partition. The order in which fetches return does not matter.
        """
        queues: dict[TopicPartition, deque[ConsumerRecord]] = {
            tp: deque() for tp in self._partitions
        }
        while True:
            dry = [tp for tp, records in queues.items() if not records]
            if any([await self._position(tp) < ends[tp.partition] for tp in dry]):
                partitions = [tp for tp, records in queues.items() if len(records) < _HELD_MAX]
                batches = await self._started.getmany(
                    *partitions, timeout_ms=1_000, max_records=_HELD_MAX
                )
                for tp, records in batches.items():
                    queues[tp].extend(records)
                continue
            heads = [(records[0].timestamp, tp) for tp, records in queues.items() if records]
            if not heads:
                return
            heapq.heapify(heads)
            while queues[tp := heads[0][1]]:
                yield queues[tp].popleft()
                if queues[tp]:
                    heapq.heapreplace(heads, (queues[tp][0].timestamp, tp))

    async def _position(self, partition: TopicPartition) -> int:
        return int(await self._started.position(partition))

    async def stop(self) -> None:
        """Close; positions that no broker accepts soon are not committed."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await connecting.stop_consumer(consumer)


async def send_dead_letter(producer: LogProducer, record: ConsumerRecord, error: Exception) -> None:
    """Send an unreadable record to its topic's dead-letter topic, and wait for the acknowledgement.

    If the record is too large for that, or stands for an unreadable batch, only its origin is sent.
    """
    FAULTS.note_unreadable(record.topic, record.partition, record.offset, str(error))
    origin = {
        "error-class": type(error).__name__,
        "error-message": clip_message(str(error)),
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
    }
    reasons = [(DEAD_LETTER_HEADERS + name, _header(value)) for name, value in origin.items()]
    topic = record.topic + DEAD_LETTER_SUFFIX
    value = None if why_unreadable(record.value) else record.value
    key = b"" if value is record.key is None else record.key  # the client refuses None twice
    try:
        headers = [*record.headers, *reasons]
        ack = await producer.send_raw(topic, value, key=key, partition=0, headers=headers)
    except RecordTooLarge:
        ack = await producer.send_raw(topic, None, key=b"", partition=0, headers=reasons)
    await ack


def _header(value: object) -> bytes:
    return str(value).encode(errors="backslashreplace")
