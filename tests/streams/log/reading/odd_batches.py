"""Batches as producers may write them, and a way to have a broker take them as they are."""

import struct
from collections.abc import Sequence
from pathlib import Path

from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c

from schemas.settings import LogSettings
from streams.log.reading.batches import UNPACKED_BYTES_MAX
from tests.waits import until

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
NUMBERS = {name: number for number, name in enumerate(CODECS)}
PACK = {"gzip": gzip_encode, "snappy": snappy_encode, "lz4": lz4_encode, "zstd": zstd_encode}


def batch(
    values: Sequence[bytes] = (b"v",),
    *,
    base: int = 0,
    codec: str = "none",
    headers: Sequence[tuple[str, bytes]] = (),
) -> bytes:
    """Return a record batch of version 2."""
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, UNPACKED_BYTES_MAX)
    for number, value in enumerate(values):
        builder.append(number, 1_000, b"k", value, list(headers))
    plain = bytes(builder.build())
    return packed(plain, codec, base=base)


def packed(plain: bytes, codec: str, *, base: int = 0, records: bytes | None = None) -> bytes:
    """Return a batch with its records in a codec, or with these bytes instead."""
    body = plain[61:] if codec == "none" else PACK[codec](plain[61:])
    data = bytearray(plain[:61] + (body if records is None else records))
    struct.pack_into(">qi", data, 0, base, len(data) - 12)
    data[22] |= NUMBERS.get(codec, 0)
    return signed(data)


def signed(data: bytearray) -> bytes:
    struct.pack_into(">I", data, 17, calc_crc32c(bytes(data[21:])))
    return bytes(data)


def with_header_name(data: bytes, name: bytes, new_name: bytes) -> bytes:
    return signed(bytearray(data.replace(name, new_name)))


def segment_of(broker_folder: Path, log: LogSettings, topic: str) -> Path:
    """Return the file of the topic's first partition; those of other tests may go meanwhile."""
    (file,) = (broker_folder / "data" / f"{log.topic_prefix}{topic}-0").glob("*.log")
    return file


async def produce_batch(log: LogSettings, topic: str, data: bytes, partition: int = 0) -> None:
    """Send a batch unchanged; the broker checks it."""
    client = AIOKafkaClient(bootstrap_servers=log.bootstrap)
    await client.bootstrap()
    try:
        full = log.topic_prefix + topic
        await client._wait_on_metadata(full)
        node = client.cluster.leader_for_partition(TopicPartition(full, partition))
        request = ProduceRequest(
            transactional_id=None, required_acks=-1, timeout=30_000,
            topics=[(full, [(partition, data)])],
        )  # fmt: skip

        async def is_taken() -> bool:
            answer = await client.send(node, request)
            code = answer.topics[0][1][0][1]
            assert code in (0, 6), answer  # a new topic's leader may not know of it yet
            return bool(code == 0)

        await until(is_taken)
    finally:
        await client.close()
