"""Follows topic `prefixes`, the events of workers' prefix caches; every router reads all of it.

There is no consumer group, as for the fleet. A router starts at the topic's end, before it joins
the fleet: workers publish a snapshot when they see a new router. Called by
`streams/agents/router.py`.
"""

import asyncio
from collections.abc import Callable

from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.records import KvEvents
from schemas.settings import LogSettings
from schemas.topics import check_record
from streams.log.clients import AssignedReader, LogProducer, send_dead_letter

RECORDS_PER_TURN = 8  # a record may have thousands of hashes; other tasks run in between


class Prefixes:
    """A reader of `prefixes`: `start`, `run` until cancelled, `stop`. Calls `on_record` with each
    record and its offset."""

    def __init__(
        self,
        log: LogSettings,
        codec: Codec,
        producer: LogProducer,
        *,
        client_id: str,
        on_record: Callable[[KvEvents, int], None],
    ) -> None:
        self._codec = codec
        self._producer = producer
        self._on_record = on_record
        self._reader = AssignedReader(log, "prefixes", [0], client_id=client_id)

    async def start(self) -> None:
        """Start at the topic's current end."""
        await self._reader.start("latest")

    async def run(self) -> None:
        """Read the topic and pass its records on, until cancelled."""
        while True:
            for record in await self._reader.batch(max_records=RECORDS_PER_TURN):
                await self.take(record)
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """Stop reading and close the reader."""
        await self._reader.stop()

    async def take(self, record: ConsumerRecord) -> None:
        """Pass one record on, or send it to the dead-letter topic."""
        if record.value is None:
            return
        try:
            events = self._decode(record)
        except RecordError as error:
            await send_dead_letter(self._producer, record, error)
            return
        self._on_record(events, record.offset)

    def _decode(self, record: ConsumerRecord) -> KvEvents:
        events = self._codec.decode(record.value)
        check_record("prefixes", events)
        assert isinstance(events, KvEvents)
        if events.block_size < 1 or len(events.stored) % 8 or len(events.removed) % 8:
            raise RecordError(
                f"{events.worker_id}: expected blocks of 1 token or more and 8 bytes a hash, found "
                f"{events.block_size} tokens, {len(events.stored)} and {len(events.removed)} bytes"
            )
        return events
