"""Topic `tokens`: decodes and checks frames, delivers them, and reads them again for a resume."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from aiokafka import ConsumerRecord
from aiokafka.errors import KafkaError

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, NotFound, RecordError
from schemas.records import TokenFrame
from schemas.settings import LogSettings
from streams.calls.stream.hub import Hub
from streams.log.clients import AssignedReader
from streams.log.slices import in_slices

logger = logging.getLogger(__name__)
_RECONNECT_S = 1.0
Bury = Callable[[ConsumerRecord, RecordError], Awaitable[None]]
FRAMES_MAX = 200  # per batch; other tasks run between batches


def frame_reader(log: LogSettings, partition: int, client_id: str) -> AssignedReader:
    """Return a reader of one partition that is not started."""
    return AssignedReader(log, "tokens", [partition], client_id=client_id)


def decode_frame(codec: Codec, value: bytes) -> TokenFrame:
    """Decode a frame; raises RecordError, also if the lengths of its columns do not match."""
    frame = codec.decode(value)
    if not isinstance(frame, TokenFrame):
        raise RecordError(f"tokens carries TokenFrame, found {type(frame).__name__}")
    rows = len(frame.request_ids)
    columns = (frame.attempts, frame.first_seqs, frame.first_chars, frame.token_counts)
    if any(len(column) != rows for column in (*columns, frame.texts)):
        raise RecordError("TokenFrame: its columns differ in length")
    if sum(frame.token_counts) != len(frame.token_ids) or min(frame.token_counts, default=0) < 0:
        raise RecordError(
            f"TokenFrame: rows of {sum(frame.token_counts)} tokens, {len(frame.token_ids)} ids"
        )
    if min((*frame.first_seqs, *frame.first_chars), default=0) < 0:
        raise RecordError("TokenFrame: expected rows that begin at 0 or later")
    return frame


async def frames_from(
    log: LogSettings,
    codec: Codec,
    partition: int,
    offset: int,
    client_id: str,
    *,
    live: bool = True,
) -> AsyncGenerator[TokenFrame]:
    """Yield the frames of any gateway's partition from an offset on: to its present end, or
    forever.

    Raises NotFound and BrokerUnavailable. Skips records that are no frames: the gateway that leases
    the partition sends them to the dead-letter topic.
    """
    if partition >= log.gateway_partitions:
        raise NotFound(f"Last-Event-ID: there is no partition {partition} of tokens")
    reader = frame_reader(log, partition, client_id)
    try:
        await reader.start("nowhere")
        if offset < (await reader.first_offsets())[partition]:
            raise NotFound("the log has the beginning of this answer no more")
        end = None if live else (await reader.end_offsets())[partition]
        await reader.seek({partition: offset})
        while end is None or offset < end:
            async for record in in_slices(await reader.batch(max_records=FRAMES_MAX)):
                offset = record.offset + 1
                try:
                    yield decode_frame(codec, record.value)
                except RecordError:
                    continue
    except KafkaError as error:
        raise BrokerUnavailable(f"tokens[{partition}]: {type(error).__name__}") from error
    finally:
        await reader.stop()


class TokenReader:
    """Reads into the hub the partitions of `tokens` that this process has leased."""

    def __init__(
        self, log: LogSettings, codec: Codec, hub: Hub, *, client_id: str, bury: Bury
    ) -> None:
        self._log, self._codec, self._hub = log, codec, hub
        self._client_id, self._bury = client_id, bury
        self._readers: dict[int, asyncio.Task[None]] = {}
        self._positions: dict[int, int] = {}

    @property
    def positions(self) -> dict[int, int]:
        """Return the next offset of each partition that is read."""
        return dict(self._positions)

    def position(self, partition: int) -> int:
        """Return the next offset of a partition that is read."""
        return self._positions[partition]

    async def read(self, partition: int, tasks: asyncio.TaskGroup) -> None:
        """Start a reader of the partition. Readers of earlier leases stop after their last call."""
        for old, task in list(self._readers.items()):
            if old != partition and not self._hub.waits_on(old):
                task.cancel()
                del self._readers[old], self._positions[old]
        if partition in self._readers:
            return
        reader = frame_reader(self._log, partition, f"{self._client_id}-tokens")
        await reader.start("latest")
        self._positions[partition] = (await reader.end_offsets())[partition]
        self._readers[partition] = tasks.create_task(self._apply_frames(partition, reader))

    async def _apply_frames(self, partition: int, reader: AssignedReader) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    records = await reader.batch(max_records=FRAMES_MAX)
                except KafkaError as error:
                    logger.warning("tokens[%d]: %s: %s", partition, type(error).__name__, error)
                    await asyncio.sleep(_RECONNECT_S)
                    continue
                now_s = loop.time()
                for record in records:
                    try:
                        self._hub.apply(decode_frame(self._codec, record.value), now_s)
                    except RecordError as error:
                        await self._bury(record, error)
                if records:
                    self._positions[partition] = records[-1].offset + 1
        finally:
            await reader.stop()

    def read_again(
        self, partition: int, offset: int, *, live: bool = True
    ) -> AsyncGenerator[TokenFrame]:
        """Yield the frames of any gateway's partition from an offset on, as `frames_from` does."""
        client_id = f"{self._client_id}-resume"
        return frames_from(self._log, self._codec, partition, offset, client_id, live=live)
