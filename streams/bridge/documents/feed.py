"""Turns rows of other topics into documents: `[[bridge.documents]]`, inside of a bridge process.

Bridges share the topics' partitions in a consumer group of its own. A partition's documents and its
offset are committed together, under a transactional id of the partition. A new owner fences the
former one, so no older row is written after a newer one, and reading a row twice gives the same
document. A record that is no row goes to its topic's dead-letter topic.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, ConsumerRecord, TopicPartition

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, RecordError, RecordTooLarge, SystemFault
from schemas.rules.sizes import check_size
from schemas.settings import LogSettings
from schemas.topics import TOPICS, partition_of
from streams.bridge.config import DocumentSource
from streams.bridge.dead_letters import dead_letter
from streams.bridge.documents.rows import change_of
from streams.bridge.log_reader import prompt_record
from streams.bridge.records.record import PromptRecord
from streams.bridge.records.writer_schemas import WriterSchemas
from streams.log.admin import create_extra_topics
from streams.log.connecting import client_options, start_client, stop_consumer
from streams.log.reading.faults import FAULTS
from streams.log.reading.fetching import LONGEST_MS, prepare_fetches
from streams.log.retry import TRANSIENT_ERRORS, retry_forever
from streams.log.slices import in_slices
from streams.log.transactions import (
    CommittedOffset,
    OutgoingRecord,
    Transactions,
    committed_offsets,
)

log = logging.getLogger("trivium.bridge")
_RECORDS_MAX = 500  # in one transaction
_LOOK_MS = 1_000
_SHORTEST_MS = 500  # shortest wait of a fetch; it grows to LONGEST_MS while no record arrives
_SUBJECT = "keeping documents"  # its name in heartbeats that report a failure


def feed_group(settings: LogSettings) -> str:
    """Return the consumer group of all bridges for topics of rows."""
    return f"{settings.topic_prefix}bridge.documents"


async def feed_documents(
    settings: LogSettings, sources: Sequence[DocumentSource], codec: Codec, name: str
) -> None:
    """Run until cancelled; after a fault of the log, continue from the commit."""

    async def run_feed() -> None:
        topics = [source.topic for source in sources]
        try:
            await create_extra_topics(
                settings, dict.fromkeys(topics, TOPICS["prompts"].retention_ms)
            )
            await _Feed(settings, sources, codec, name).run()
        except TRANSIENT_ERRORS as error:
            FAULTS.note_failing(_SUBJECT, f"{type(error).__name__}: {error}")
            raise

    await retry_forever(run_feed, f"{name}: documents", log)


class _Feed(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types here
    """One membership in the consumer group of the document topics."""

    def __init__(
        self, settings: LogSettings, sources: Sequence[DocumentSource], codec: Codec, name: str
    ) -> None:
        self._settings, self._codec, self._name = settings, codec, name
        self._sources = {source.topic: source for source in sources}
        self._schemas = WriterSchemas(settings.schema_registry, settings.request_timeout_ms)
        self._writers: dict[TopicPartition, Transactions] = {}
        self._writing = asyncio.Lock()  # held during a transaction

    async def run(self) -> None:
        """Read rows and write documents; raises the log's errors, and Fenced."""
        consumer = AIOKafkaConsumer(
            **client_options(self._settings),
            client_id=f"{self._name}-documents",
            group_id=feed_group(self._settings),
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
        )
        prepare_fetches(consumer, _SHORTEST_MS, LONGEST_MS)
        consumer.subscribe(list(self._sources), listener=self)
        await start_client(consumer.start, consumer.stop)
        try:
            while True:
                batches = await consumer.getmany(timeout_ms=_LOOK_MS, max_records=_RECORDS_MAX)
                async with self._writing:
                    for place, records in batches.items():
                        if place in consumer.assignment():
                            await self._write(place, records)
                FAULTS.note_working(_SUBJECT)
        finally:
            await stop_consumer(consumer, self._settings.request_timeout_ms / 1000)
            await self._stop_writers()

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Stop all writers; when this returns, the group may assign the partitions elsewhere."""
        async with self._writing:
            await self._stop_writers()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Do nothing: the first record of a partition fences its former owner."""

    async def _stop_writers(self) -> None:
        writers, self._writers = self._writers, {}
        await asyncio.gather(*(writer.stop() for writer in writers.values()))

    async def _write(self, place: TopicPartition, records: Sequence[ConsumerRecord]) -> None:
        group, full_place = feed_group(self._settings), (place.topic, place.partition)
        writer = self._writers.get(place)
        if writer is None:
            transactional_id = f"documents-{place.topic}-{place.partition}"
            writer = self._writers[place] = Transactions(self._settings, transactional_id)
            await writer.start()
            commit = (await committed_offsets(self._settings, group, [full_place])).get(full_place)
            records = [
                message for message in records if commit is None or message.offset >= commit.offset
            ]
        if not records:
            return
        rows = [prompt_record(message) for message in records]
        sends = [await self._sending(record) async for record in in_slices(rows)]
        position = CommittedOffset(records[-1].offset + 1)
        try:
            await writer.commit(sends, {full_place: position}, group)
        except RecordTooLarge:  # a topic's limit is lower than the one that Trivium set
            for record, sending in zip(rows, sends, strict=True):
                await self._write_alone(writer, record, sending)

    async def _write_alone(
        self, writer: Transactions, record: PromptRecord, sending: OutgoingRecord
    ) -> None:
        """Write one document; if its topic refuses it, write a dead letter with the origin only."""
        place, position = (record.topic, record.partition), CommittedOffset(record.offset + 1)
        await writer.stop()  # it cannot be used after an error
        await writer.start()
        try:
            await writer.commit([sending], {place: position}, feed_group(self._settings))
        except RecordTooLarge as error:
            log.warning("%s[%d]@%d: %s", record.topic, record.partition, record.offset, error)
            await writer.stop()
            await writer.start()
            letter = dead_letter(record, error, bytes_max=0)
            await writer.commit([letter], {place: position}, feed_group(self._settings))

    async def _sending(self, record: PromptRecord) -> OutgoingRecord:
        try:
            change = await change_of(record, self._sources[record.topic], self._schemas)
            value = None if change.document is None else self._codec.encode(change.document)
            if value is not None:
                check_size(change.document, len(value))
        except RecordError as error:
            log.warning("%s[%d]@%d: %s", record.topic, record.partition, record.offset, error)
            return dead_letter(record, error)
        except BrokerUnavailable:
            raise  # the schema registry is unavailable for long
        except Exception as error:  # one faulty row must not stop the others
            log.exception("%s[%d]@%d", record.topic, record.partition, record.offset)
            return dead_letter(record, SystemFault(f"not read: {type(error).__name__}: {error}"))
        return OutgoingRecord(
            topic=self._settings.topic_prefix + "documents",
            partition=partition_of(change.key, self._settings.document_partitions),
            key=change.key.encode(),
            value=value,
        )
