"""Decodes and checks frames of topic `tokens`, and reads them again for a resume."""

from collections.abc import AsyncGenerator

from aiokafka.errors import KafkaError

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, NotFound, RecordError
from schemas.records import TokenFrame
from schemas.settings import LogSettings
from streams.log.clients import AssignedReader
from streams.log.slices import in_slices

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
