"""Batches that aiokafka cannot read: what a real broker keeps of them, and what readers get."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cramjam
import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from confluent_kafka import Producer

from schemas.codec import Codec, why_unreadable
from schemas.errors import RecordError
from schemas.settings import LogSettings
from streams.log.clients import AssignedReader
from streams.log.connecting import client_options
from streams.log.reading.batches import UNPACKED_BYTES_MAX, UnreadableRange, readable
from streams.log.transactions import OutgoingRecord, Transactions
from tests.streams.log.reading.odd_batches import (
    CODECS,
    PACK,
    batch,
    packed,
    produce_batch,
    segment_of,
    signed,
    with_header_name,
)


def read(data: bytes) -> list[tuple[int, Any]]:
    """Return offsets and values as aiokafka reads them; for a placeholder, its reason."""
    contents, records = list[tuple[int, Any]](), MemoryRecords(data)
    while records.has_next():
        record_batch = records.next_batch()
        assert record_batch is not None and record_batch.validate_crc()
        contents += [(record.offset, _value_or_reason(record.value)) for record in record_batch]
    return contents


def _value_or_reason(value: bytes | None) -> object:
    return why_unreadable(value) or value


@pytest.mark.parametrize("codec", CODECS)
def test_readable_unpacks_every_codec_and_keeps_plain_batches(codec: str) -> None:
    values = [b"a" * 1_000, b"", b"b"]
    data = batch(values, base=7, codec=codec) + batch([b"c"], base=10)
    result = readable(data, 7)
    assert read(result.data) == [(7, values[0]), (8, b""), (9, b"b"), (10, b"c")]
    assert result.passed_over == []
    assert (result.data is data) == (codec == "none")


def test_readable_unpacks_snappy_blocks_and_streams() -> None:
    """Java clients write streams, and two of them where two batches become one."""
    plain = batch([b"x" * 5_000, b"y"])
    header = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)

    def stream(data: bytes) -> bytes:
        block = bytes(cramjam.snappy.compress_raw(data))
        return header + struct.pack(">i", len(block)) + block

    body = plain[61:]
    for records in (stream(body), stream(body[:100]) + stream(body[100:])):
        data = packed(plain, "snappy", records=records)
        assert read(readable(data, 0).data) == read(plain)


@pytest.mark.parametrize("codec", CODECS[1:])
@pytest.mark.parametrize("damage", ["cut off", "other bytes", "not its codec"])
def test_damaged_batch_becomes_one_record_with_reason(codec: str, damage: str) -> None:
    plain = batch([b"x" * 5_000, b"y", b"z"])
    body = PACK[codec](plain[61:])
    records = {
        "cut off": body[: len(body) // 2],
        "other bytes": body[:30] + bytes(30) + body[60:],
        "not its codec": b"\x01" * 40,
    }[damage]
    data = packed(plain, codec, base=5, records=records)
    result = readable(batch([b"a"], base=4) + data + batch([b"b"], base=8), 4, closely=True)
    (first, (offset, why), last) = read(result.data)
    assert (first, last) == ((4, b"a"), (8, b"b"))
    assert offset == 7 and why.startswith("offsets 5 to 7 cannot be read: ")
    assert [(gap.first, gap.last) for gap in result.passed_over] == [(5, 7)]


@pytest.mark.parametrize("codec", ["gzip", "lz4", "zstd"])
def test_readable_rejects_batch_that_unpacks_too_large(codec: str) -> None:
    plain = batch([b"x"])
    data = packed(plain, codec, records=PACK[codec](bytes(UNPACKED_BYTES_MAX + 1)))
    ((_, why),) = read(readable(data, 0).data)
    assert f"larger than {UNPACKED_BYTES_MAX} bytes" in why


def test_readable_rejects_snappy_by_claimed_size() -> None:
    claimed = b"\xff\xff\xff\xff\x0f" + b"\x04abcd"
    ((_, why),) = read(readable(packed(batch(), "snappy", records=claimed), 0).data)
    assert f"larger than {UNPACKED_BYTES_MAX} bytes" in why


def test_readable_names_unknown_codec() -> None:
    data = bytearray(batch([b"a", b"b"]))
    data[22] |= 6
    ((offset, why),) = read(readable(signed(data), 0).data)
    assert (offset, "number 6" in why) == (1, True)


def test_readable_leaves_batches_over_budget_to_next_fetch() -> None:
    first = batch([b"x" * 1_000], codec="zstd")
    second = batch([b"y"], base=1, codec="zstd")
    result = readable(first + second, 0, budget_bytes=500)
    assert [offset for offset, _ in read(result.data)] == [0]
    assert readable(first, 0, budget_bytes=0).data == b""
    bad = packed(batch(), "zstd", records=b"nothing")
    assert [at for at, _ in read(readable(bad + second, 0).data)] == [0], "it may have been as much"
    assert readable(batch(), 0, budget_bytes=0).data == batch(), (
        "what is not compressed is no matter"
    )


def test_damaged_batch_ends_where_next_batch_begins() -> None:
    """The damaged header counts only where two of its fields agree."""
    damaged = bytearray(batch([b"a" * 100, b"b"], base=3))
    damaged[90] ^= 0xFF
    data = bytes(damaged) + batch([b"c"], base=9)
    assert readable(data, 3, closely=True).passed_over == [
        UnreadableRange(3, 8, "its checksum is wrong")  # compaction leaves gaps
    ]
    assert readable(bytes(damaged), 3, closely=True).passed_over[0].last == 4
    struct.pack_into(">i", damaged, 23, 1_000_000)  # how far its last offset is from its first
    result = readable(bytes(damaged), 3, closely=True)
    assert (result.passed_over[0].last, [at for at, _ in read(result.data)]) == (3, [3])


def test_readable_skips_one_offset_on_impossible_length() -> None:
    for length in (1 << 30, 3, -5):
        damaged = bytearray(batch([b"a", b"b"], base=3))
        struct.pack_into(">i", damaged, 8, length)
        assert readable(bytes(damaged), 4).passed_over[0].last == 4
        good = batch([b"c"], base=2)
        assert read(readable(good + bytes(damaged), 2).data) == [(2, b"c")], "the next has it first"
    cut = batch([b"c"], base=2) + batch([b"d"], base=3)[:-1]
    assert readable(cut, 2).data == cut, "brokers cut off what is too much"


def test_readable_replaces_invalid_utf8_in_header_names() -> None:
    names: list[tuple[str, bytes]] = [("name", b"\xff"), ("größe", b"1")]
    data = batch([b"v", b"w"], headers=names)
    data = with_header_name(data, b"name", b"n\xff\xc3e")
    with pytest.raises(UnicodeDecodeError):
        read(data)
    result = readable(data, 0, closely=True)
    (first, second) = DefaultRecordBatch(result.data)
    assert first.headers == second.headers == [("n??e", b"\xff"), ("größe", b"1")]
    assert (first.value, second.value, result.passed_over) == (b"v", b"w", [])


def test_placeholder_batch_keeps_transaction_of_damaged_batch() -> None:
    """If the transaction is aborted, nobody reads the placeholder."""
    builder = DefaultRecordBatchBuilder(2, 0, 1, 77, 3, 0, 1_000)
    builder.append(0, 1_000, None, b"v", [])
    data = packed(bytes(builder.build()), "zstd", records=b"nothing")
    placeholder = DefaultRecordBatch(readable(data, 0).data)
    assert (placeholder.is_transactional, placeholder.producer_id, placeholder.producer_epoch) == (
        True,
        77,
        3,
    )


# A real broker


def produce(log: LogSettings, topic: str, codec: str, values: Sequence[bytes]) -> None:
    """Produce with librdkafka, which sends uncompressed what a codec does not shrink."""
    producer = Producer(
        {"bootstrap.servers": log.bootstrap, "compression.type": codec, "linger.ms": 50}
    )
    for value in values:
        producer.produce(log.topic_prefix + topic, value, partition=0)
    assert producer.flush(60) == 0


async def read_all(log: LogSettings, topic: str) -> list[tuple[int, object]]:
    reader = AssignedReader(log, topic, [0], client_id="reader")
    async with reader.reading("earliest"):
        return [
            (record.offset, _value_or_reason(record.value)) for record in await reader.read_to_end()
        ]


@pytest.mark.kafka
async def test_reader_reads_every_codec_of_stock_producer(kafka: LogSettings) -> None:
    values = [f"{codec} {n} ".encode() * 50 for codec in CODECS for n in range(3)]
    for number, codec in enumerate(CODECS):
        produce(kafka, "prompts", codec, values[3 * number : 3 * number + 3])
    assert await read_all(kafka, "prompts") == list(enumerate(values))


@pytest.mark.kafka
@pytest.mark.parametrize("codec", CODECS[1:])
async def test_reader_reads_batches_recompressed_by_broker(kafka: LogSettings, codec: str) -> None:
    """The broker recompresses Trivium's records, also in transactions, and Faust reads them."""
    topic = f"{kafka.topic_prefix}prompts"
    admin = AIOKafkaAdminClient(**client_options(kafka))
    await admin.start()
    config = {"compression.type": codec}
    await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, config)])
    await admin.close()
    writer = Transactions(kafka, "writer")
    await writer.start()
    values = [f"{n} ".encode() * 100 for n in range(3)]
    sends = [OutgoingRecord(topic=topic, partition=0, key=b"k", value=value) for value in values]
    try:
        await writer.commit(sends)
    finally:
        await writer.stop()
    stock = AIOKafkaConsumer(
        topic, bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest",
        isolation_level="read_committed",
    )  # fmt: skip
    await stock.start()
    try:
        (record, *_) = (await stock.getmany(timeout_ms=30_000, max_records=1)).popitem()[1]
    finally:
        await stock.stop()
    assert record.value == values[0]
    assert [value for _, value in await read_all(kafka, "prompts")][-3:] == values


@pytest.mark.kafka
async def test_reader_continues_after_batches_that_aiokafka_rejects(
    kafka: LogSettings, broker_folder: Path
) -> None:
    """One header name is no UTF-8, and one batch is damaged on the broker's disk."""
    odd = with_header_name(batch([b"odd"], headers=[("name", b"")]), b"name", b"n\xffme")
    await produce_batch(kafka, "prompts", batch([b"first"]))
    await produce_batch(kafka, "prompts", odd)
    await produce_batch(kafka, "prompts", batch([b"damaged-1", b"damaged-2"]))
    await produce_batch(kafka, "prompts", batch([b"last"], codec="lz4"))
    file = segment_of(broker_folder, kafka, "prompts")
    data = file.read_bytes()
    with file.open("r+b") as segment:
        segment.seek(data.index(b"damaged-1"))
        segment.write(b"D")
    contents = await read_all(kafka, "prompts")
    assert contents[:2] == [(0, b"first"), (1, b"odd")]
    assert contents[2] == (3, "offsets 2 to 3 cannot be read: its checksum is wrong")
    assert contents[3:] == [(4, b"last")]


@pytest.mark.kafka
async def test_reader_loses_no_records_beside_rejected_partition(
    kafka: LogSettings,
) -> None:
    """Records of other partitions were once dropped with the rejected one (found 28)."""
    odd = with_header_name(batch([b"odd"], headers=[("name", b"")]), b"name", b"n\xffme")
    await produce_batch(kafka, "tokens", batch([b"first"]), 0)
    await produce_batch(kafka, "tokens", odd, 1)
    reader = AssignedReader(kafka, "tokens", range(2), client_id="reader")
    async with reader.reading("earliest"):
        pairs = {(record.partition, record.value) for record in await reader.read_to_end()}
    assert pairs == {(0, b"first"), (1, b"odd")}


def test_placeholder_record_decodes_to_error_with_reason() -> None:
    (record,) = DefaultRecordBatch(readable(packed(batch(), "zstd", records=b"x"), 0).data)
    with pytest.raises(RecordError, match="offset 0 cannot be read: zstd: "):
        Codec().decode(record.value)
