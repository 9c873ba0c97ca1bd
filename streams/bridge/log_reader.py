"""Reads of the log outside of Faust: existing prompts, and tokens of a predecessor's requests."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from aiokafka import ConsumerRecord
from aiokafka.errors import KafkaError

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, RecordError
from schemas.rules.sizes import RECORD_BYTES_MAX
from schemas.settings import LogSettings
from streams.bridge.records.record import PromptRecord
from streams.calls.log.tokens import FRAMES_MAX, decode_frame, frame_reader
from streams.calls.stream.hub import Hub
from streams.log.clients import AssignedReader
from streams.log.slices import in_slices
from streams.log.transactions import FullPlace

_RECORDS_MAX = 5_000  # per fetch
_GAP_BYTES = 64 << 10  # per fetch; small, because records after a gap were already read


def prompt_record(record: ConsumerRecord) -> PromptRecord:
    """Return a consumer's record as a `PromptRecord`."""
    return PromptRecord(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        timestamp_ms=record.timestamp,
        key=record.key,
        value=record.value,
        headers=tuple(record.headers),
    )


class PromptLogReader:
    """Reads prompts of one partition that are already in the log."""

    def __init__(self, log: LogSettings, place: FullPlace, client_id: str) -> None:
        self._log = dataclasses.replace(log, topic_prefix="")  # `place` has the full topic name
        self._topic, self._partition = place
        self._client_id = client_id
        self._gap_reader: AssignedReader | None = None
        self._turn = asyncio.Lock()

    def _reader(self, fetch_bytes: int = RECORD_BYTES_MAX) -> AssignedReader:
        return AssignedReader(
            self._log,
            self._topic,
            [self._partition],
            client_id=self._client_id,
            committed_only=True,
            fetch_bytes=fetch_bytes,
        )

    async def bounds(self) -> tuple[int, int]:
        """Return the first offset, and the one after the last committed or aborted record."""
        async with self._reader().reading("nowhere") as reader:
            first, end = await reader.first_offsets(), await reader.end_offsets()
        return first[self._partition], end[self._partition]

    async def records(self, since: int, until: int) -> AsyncGenerator[PromptRecord]:
        """Yield all records between these offsets. Raises BrokerUnavailable."""
        if since >= until:
            return
        with self._as_unavailable():
            async with self._reader().reading("nowhere") as reader:
                async for record in self._read(reader, since, until):
                    yield record

    async def gap(self, since: int, until: int) -> AsyncGenerator[PromptRecord]:
        """Yield the records of a gap. Each transaction of prompts leaves a gap, so the consumer for
        gaps is kept until `close`.
        """
        async with self._turn:
            with self._as_unavailable():
                if self._gap_reader is None:
                    reader = self._reader(_GAP_BYTES)
                    await reader.start("nowhere")
                    self._gap_reader = reader
                async for record in self._read(self._gap_reader, since, until):
                    yield record
                self._gap_reader.pause()

    async def _read(
        self, reader: AssignedReader, since: int, until: int
    ) -> AsyncGenerator[PromptRecord]:
        await reader.seek({self._partition: since})
        max_records = min(_RECORDS_MAX, until - since)
        async for batch in reader.until({self._partition: until}, max_records=max_records):
            async for record in in_slices(batch):
                if record.offset < until:
                    yield prompt_record(record)

    @contextmanager
    def _as_unavailable(self) -> Iterator[None]:
        try:
            yield
        except KafkaError as error:
            raise BrokerUnavailable(f"{self._topic}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Close the consumer for gaps, if there is one."""
        reader, self._gap_reader = self._gap_reader, None
        if reader is not None:
            await reader.stop()


async def replay(
    log: LogSettings, codec: Codec, hub: Hub, partition: int, offset: int, client_id: str,
    *, live: bool = False,
) -> int:  # fmt: skip
    """Apply frames of a partition of `tokens` from an offset to its end, or live, to the hub.

    Return the offset after the last one. Deleted offsets are skipped. Raises BrokerUnavailable.
    """
    loop = asyncio.get_running_loop()
    try:
        async with frame_reader(log, partition, client_id).reading("nowhere") as reader:
            first, end = await reader.first_offsets(), await reader.end_offsets()
            offset = max(offset, first[partition])
            await reader.seek({partition: offset})
            while live or offset < end[partition]:
                batch = await reader.batch(max_records=FRAMES_MAX, timeout_ms=1_000)
                async for record in in_slices(batch):
                    offset = record.offset + 1
                    try:
                        hub.apply(decode_frame(codec, record.value), loop.time())
                    except RecordError:  # its gateway sends it to the dead-letter topic
                        continue
                await asyncio.sleep(0)
            return offset
    except KafkaError as error:
        raise BrokerUnavailable(f"tokens[{partition}]: {type(error).__name__}: {error}") from error
