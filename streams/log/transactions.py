"""Commits records and read positions in one transaction, from one writer at a time.

Starting with a `transactional_id` fences the process that had it before: its open transaction is
aborted, and it commits nothing more, however long it was paused. So a successor that reads the
committed position (`committed_offsets`) finds all that was committed. Consumers see committed
records only with `isolation.level=read_committed`. Kafka's own protocol (KIP-98), by aiokafka.

A broker that is killed can leave a transaction open that its coordinator has lost (KIP-890).
Readers would stop before it, and the next commit to that partition would commit it too. So the
first transaction on each partition is aborted: that voids such records, and the partition then
refuses late records of a former writer.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    IllegalOperation,
    KafkaError,
    MessageSizeTooLargeError,
    OutOfOrderSequenceNumber,
    ProducerFenced,
)
from aiokafka.structs import OffsetAndMetadata

from schemas.errors import BrokerUnavailable, Fenced, RecordTooLarge, TriviumError
from schemas.rules.sizes import RECORD_BYTES_MAX
from schemas.settings import LogSettings
from streams.log.cancellation import run_within
from streams.log.clients import Headers
from streams.log.connecting import CLOSE_S, client_options, close_producer, no_broker, start_client

# For this time the open transaction of a dead writer blocks readers of committed records, unless a
# successor comes.
TRANSACTION_MS = 10_000
_RETRY_S = 0.1
_VOID = b"trivium/void"  # key of the aborted records; no other record has it
_FRAME_BYTES, _HEADER_BYTES = 128, 10  # overhead of a batch of one record, and of a header
_FENCED = (ProducerFenced, OutOfOrderSequenceNumber)
_REFUSALS = (IllegalOperation, AssertionError)  # raised after a transaction has failed
FullPlace = tuple[str, int]  # topic, with its prefix, and partition


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """A group's committed offset, with `metadata` (at most 4 096 bytes) for its next reader."""

    offset: int
    metadata: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingRecord:
    """One record as bytes, with its topic's full name; without a value, a tombstone."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Headers = field(default=())

    @property
    def bytes_at_most(self) -> int:
        """Return an upper bound of its size, framing included, for `max.message.bytes`."""
        texts = [len(name) + len(value or b"") + _HEADER_BYTES for name, value in self.headers]
        return len(self.key or b"") + len(self.value or b"") + sum(texts) + _FRAME_BYTES


class Transactions:
    """Commits for one `transactional_id`, one at a time. Not usable after any error: create another
    one, and read what is committed."""

    def __init__(self, settings: LogSettings, transactional_id: str) -> None:
        self._settings = settings
        self._id = settings.topic_prefix + transactional_id
        self._producer: AIOKafkaProducer | None = None
        self._voided: set[FullPlace] = set()  # partitions without a stale open transaction
        # A replicated log may need more time: its leaders change.
        self._limit_ms = max(TRANSACTION_MS, settings.request_timeout_ms)

    async def start(self, reads: Sequence[FullPlace] = ()) -> None:
        """Connect, and fence the last owner of the id; raises BrokerUnavailable and Fenced.

        Stale transactions on `reads`, partitions that are read next, are aborted first.
        """
        producer = AIOKafkaProducer(
            **client_options(self._settings),
            client_id=self._id,
            transactional_id=self._id,
            transaction_timeout_ms=self._limit_ms,
            max_batch_size=1 << 18,
            max_request_size=RECORD_BYTES_MAX,
        )
        async with self._translated_errors(producer):
            await start_client(producer.start, producer.stop)
        self._producer = producer
        async with self._translated_errors(producer):
            await self._void(producer, reads)

    async def _void(self, producer: AIOKafkaProducer, places: Iterable[FullPlace]) -> None:
        """Abort what former transactions may have left open: see the module's docstring."""
        new = set(places) - self._voided
        if not new:
            return
        await producer.begin_transaction()
        acks = [await producer.send(topic, b"", key=_VOID, partition=p) for topic, p in new]
        await asyncio.gather(*acks)
        await producer.abort_transaction()
        self._voided |= new

    async def commit(
        self,
        sends: Sequence[OutgoingRecord],
        positions: Mapping[FullPlace, CommittedOffset] | None = None,
        group_id: str = "",
    ) -> list[int]:
        """Commit all of it or nothing; return the offset of each record. It is decided when this
        returns, and visible to readers a moment later.

        Raises Fenced if another process has the id now, RecordTooLarge, and BrokerUnavailable if it
        is unknown whether the transaction was committed.
        """
        producer = self._producer
        if producer is None:
            raise BrokerUnavailable(f"{self._id}: the transactional producer is not started")
        async with self._translated_errors(producer):
            await self._void(producer, ((sending.topic, sending.partition) for sending in sends))
        async with self._translated_errors(producer), _transaction(producer):
            acks = [
                await producer.send(
                    sending.topic,
                    sending.value,
                    key=sending.key,
                    partition=sending.partition,
                    headers=list(sending.headers),
                )
                for sending in sends
            ]
            written = await asyncio.gather(*acks)
            if positions:
                await producer.send_offsets_to_transaction(_offsets(positions), group_id)
        return [metadata.offset for metadata in written]

    async def stop(self) -> None:
        """Close; abort what is not committed."""
        producer, self._producer = self._producer, None
        if producer is not None:
            with contextlib.suppress(KafkaError):
                await close_producer(producer, self._settings.request_timeout_ms / 1000)

    async def restart(self) -> None:
        """Restart after a commit that a topic has refused; raises as `start` does."""
        await self.stop()
        await self.start()

    @contextlib.asynccontextmanager
    async def _translated_errors(self, producer: AIOKafkaProducer) -> AsyncIterator[None]:
        """Bound the time of the context, and raise our errors for Kafka's."""
        try:
            async with asyncio.timeout(self._limit_ms / 1000):
                yield
        except (KafkaError, TimeoutError, *_REFUSALS) as raised:
            error = _failure(producer) if isinstance(raised, _REFUSALS) else raised
            if error is None:
                raise
            raise self._translate(error) from error

    def _translate(self, error: BaseException) -> TriviumError:
        if isinstance(error, _FENCED):
            return Fenced(f"{self._id}: another process writes this now")
        if isinstance(error, MessageSizeTooLargeError):
            return RecordTooLarge(f"{self._id}: not sent: {error}")
        if isinstance(error, KafkaError) and self._producer is None:
            return no_broker(self._settings.bootstrap, error)
        return BrokerUnavailable(f"{self._id}: not committed: {type(error).__name__}: {error}")


@contextlib.asynccontextmanager
async def _transaction(producer: AIOKafkaProducer) -> AsyncIterator[None]:
    """Commit at the end of the context, or abort. aiokafka's own context would wait for an abort
    for ever if no broker answers; the next owner of the id aborts what stays open."""
    await producer.begin_transaction()
    try:
        yield
    except BaseException as raised:
        error = _failure(producer) if isinstance(raised, _REFUSALS) else None
        if not producer._txn_manager.is_fatal_error():  # noqa: SLF001  # it has no public name
            with contextlib.suppress(KafkaError, *_REFUSALS):
                await run_within(CLOSE_S, producer.abort_transaction())
        raise (error or raised) from raised.__cause__
    await producer.commit_transaction()


def _failure(producer: AIOKafkaProducer) -> BaseException | None:
    """Return the error of the open transaction that aiokafka's sender has met, if any."""
    end = producer._txn_manager._transaction_waiter  # noqa: SLF001  # it has no public name
    return end.exception() if end is not None and end.done() and not end.cancelled() else None


def _offsets(
    positions: Mapping[FullPlace, CommittedOffset],
) -> dict[TopicPartition, OffsetAndMetadata]:
    return {
        TopicPartition(*place): OffsetAndMetadata(position.offset, position.metadata)
        for place, position in positions.items()
    }


async def committed_offsets(
    settings: LogSettings, group_id: str, places: Sequence[FullPlace]
) -> dict[FullPlace, CommittedOffset]:
    """Return a group's committed offsets, as far as there are any. Raise BrokerUnavailable.

    Call it after `Transactions.start`, which aborts open transactions.
    """
    admin = AIOKafkaAdminClient(**client_options(settings))
    try:
        await start_client(admin.start, admin.close)
    except KafkaError as error:
        raise no_broker(settings.bootstrap, error) from error
    partitions = [TopicPartition(*place) for place in places]
    try:
        async with asyncio.timeout(settings.request_timeout_ms / 1000):
            while True:
                try:
                    offsets = await admin.list_consumer_group_offsets(
                        group_id, partitions=partitions
                    )
                    break
                except KafkaError as error:
                    if not error.retriable:  # a new cluster has no coordinator at first
                        raise
                    await asyncio.sleep(_RETRY_S)
    except (KafkaError, TimeoutError) as error:
        raise BrokerUnavailable(f"{group_id}: no offsets: {error}") from error
    finally:
        await run_within(CLOSE_S, admin.close())
    return {
        (tp.topic, tp.partition): CommittedOffset(at.offset, at.metadata or "")
        for tp, at in offsets.items()
        if at.offset >= 0
    }
