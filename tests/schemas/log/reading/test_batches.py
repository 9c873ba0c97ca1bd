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
from schemas.log.clients import AssignedReader
from schemas.log.connecting import client_options
from schemas.log.reading.batches import UNPACKED_BYTES_MAX, UnreadableRange, readable
from schemas.log.transactions import OutgoingRecord, Transactions
from schemas.settings import LogSettings
from tests.schemas.log.reading.odd_batches import (
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
    """Offsets and values, as aiokafka has them; of what stands for others why."""
    found, records = list[tuple[int, Any]](), MemoryRecords(data)
    while records.has_next():
        one = records.next_batch()
        assert one is not None and one.validate_crc()
        found += [(record.offset, _told(record.value)) for record in one]
    return found


def _told(value: bytes | None) -> object:
    return why_unreadable(value) or value


@pytest.mark.parametrize("codec", CODECS)
def test_all_codecs_are_unpacked_and_what_is_not_compressed_is_left_alone(codec: str) -> None:
    values = [b"a" * 1_000, b"", b"b"]
    data = batch(values, base=7, codec=codec) + batch([b"c"], base=10)
    found = readable(data, 7)
    assert read(found.data) == [(7, values[0]), (8, b""), (9, b"b"), (10, b"c")]
    assert found.passed_over == []
    assert (found.data is data) == (codec == "none")


def test_snappy_comes_as_one_block_and_as_streams_of_blocks() -> None:
    """Java writes streams, and where two batches become one, two of them."""
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
def test_what_cannot_be_unpacked_is_one_record_that_says_why(codec: str, damage: str) -> None:
    plain = batch([b"x" * 5_000, b"y", b"z"])
    body = PACK[codec](plain[61:])
    records = {
        "cut off": body[: len(body) // 2],
        "other bytes": body[:30] + bytes(30) + body[60:],
        "not its codec": b"\x01" * 40,
    }[damage]
    data = packed(plain, codec, base=5, records=records)
    found = readable(batch([b"a"], base=4) + data + batch([b"b"], base=8), 4, closely=True)
    (first, (offset, why), last) = read(found.data)
    assert (first, last) == ((4, b"a"), (8, b"b"))
    assert offset == 7 and why.startswith("offsets 5 to 7 cannot be read: ")
    assert [(lost.first, lost.last) for lost in found.passed_over] == [(5, 7)]


@pytest.mark.parametrize("codec", ["gzip", "lz4", "zstd"])
def test_a_few_bytes_that_stand_for_many_are_not_unpacked(codec: str) -> None:
    plain = batch([b"x"])
    data = packed(plain, codec, records=PACK[codec](bytes(UNPACKED_BYTES_MAX + 1)))
    ((_, why),) = read(readable(data, 0).data)
    assert f"larger than {UNPACKED_BYTES_MAX} bytes" in why


def test_snappy_says_how_much_it_stands_for_before_it_is_unpacked() -> None:
    claimed = b"\xff\xff\xff\xff\x0f" + b"\x04abcd"
    ((_, why),) = read(readable(packed(batch(), "snappy", records=claimed), 0).data)
    assert f"larger than {UNPACKED_BYTES_MAX} bytes" in why


def test_a_codec_that_nobody_knows_is_named() -> None:
    data = bytearray(batch([b"a", b"b"]))
    data[22] |= 6
    ((offset, why),) = read(readable(signed(data), 0).data)
    assert (offset, "number 6" in why) == (1, True)


def test_more_than_one_fetch_may_unpack_is_left_to_the_next() -> None:
    one = batch([b"x" * 1_000], codec="zstd")
    two = batch([b"y"], base=1, codec="zstd")
    found = readable(one + two, 0, budget_bytes=500)
    assert [offset for offset, _ in read(found.data)] == [0]
    assert readable(one, 0, budget_bytes=0).data == b""
    bad = packed(batch(), "zstd", records=b"nothing")
    assert [at for at, _ in read(readable(bad + two, 0).data)] == [0], "it may have been as much"
    assert readable(batch(), 0, budget_bytes=0).data == batch(), (
        "what is not compressed is no matter"
    )


def test_a_damaged_batch_ends_where_the_next_one_begins() -> None:
    """Its own words count only where two of them agree."""
    damaged = bytearray(batch([b"a" * 100, b"b"], base=3))
    damaged[90] ^= 0xFF
    data = bytes(damaged) + batch([b"c"], base=9)
    assert readable(data, 3, closely=True).passed_over == [
        UnreadableRange(3, 8, "its checksum is wrong")  # compaction leaves gaps
    ]
    assert readable(bytes(damaged), 3, closely=True).passed_over[0].last == 4
    struct.pack_into(">i", damaged, 23, 1_000_000)  # how far its last offset is from its first
    found = readable(bytes(damaged), 3, closely=True)
    assert (found.passed_over[0].last, [at for at, _ in read(found.data)]) == (3, [3])


def test_a_length_that_cannot_be_is_passed_over_offset_by_offset() -> None:
    for length in (1 << 30, 3, -5):
        damaged = bytearray(batch([b"a", b"b"], base=3))
        struct.pack_into(">i", damaged, 8, length)
        assert readable(bytes(damaged), 4).passed_over[0].last == 4
        good = batch([b"c"], base=2)
        assert read(readable(good + bytes(damaged), 2).data) == [(2, b"c")], "the next has it first"
    cut = batch([b"c"], base=2) + batch([b"d"], base=3)[:-1]
    assert readable(cut, 2).data == cut, "brokers cut off what is too much"


def test_names_of_headers_that_are_no_utf8_are_read() -> None:
    names: list[tuple[str, bytes]] = [("name", b"\xff"), ("größe", b"1")]
    data = batch([b"v", b"w"], headers=names)
    data = with_header_name(data, b"name", b"n\xff\xc3e")
    with pytest.raises(UnicodeDecodeError):
        read(data)
    found = readable(data, 0, closely=True)
    (first, second) = DefaultRecordBatch(found.data)
    assert first.headers == second.headers == [("n??e", b"\xff"), ("größe", b"1")]
    assert (first.value, second.value, found.passed_over) == (b"v", b"w", [])


def test_what_stands_for_a_batch_is_of_its_transaction() -> None:
    """If that is given up, nobody reads it."""
    builder = DefaultRecordBatchBuilder(2, 0, 1, 77, 3, 0, 1_000)
    builder.append(0, 1_000, None, b"v", [])
    data = packed(bytes(builder.build()), "zstd", records=b"nothing")
    one = DefaultRecordBatch(readable(data, 0).data)
    assert (one.is_transactional, one.producer_id, one.producer_epoch) == (True, 77, 3)


# A real broker


def produce(log: LogSettings, topic: str, codec: str, values: Sequence[bytes]) -> None:
    """As librdkafka does: what a codec does not make smaller is sent as it is."""
    producer = Producer(
        {"bootstrap.servers": log.bootstrap, "compression.type": codec, "linger.ms": 50}
    )
    for value in values:
        producer.produce(log.topic_prefix + topic, value, partition=0)
    assert producer.flush(60) == 0


async def read_all(log: LogSettings, topic: str) -> list[tuple[int, object]]:
    reader = AssignedReader(log, topic, [0], client_id="reader")
    async with reader.reading("earliest"):
        return [(each.offset, _told(each.value)) for each in await reader.read_to_end()]


@pytest.mark.kafka
async def test_what_stock_producers_compress_is_read(kafka: LogSettings) -> None:
    values = [f"{codec} {n} ".encode() * 50 for codec in CODECS for n in range(3)]
    for number, codec in enumerate(CODECS):
        produce(kafka, "prompts", codec, values[3 * number : 3 * number + 3])
    assert await read_all(kafka, "prompts") == list(enumerate(values))


@pytest.mark.kafka
@pytest.mark.parametrize("codec", CODECS[1:])
async def test_what_a_topic_compresses_is_read(kafka: LogSettings, codec: str) -> None:
    """The broker recompresses what Trivium writes, in transactions too, and Faust reads that."""
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
async def test_a_reader_goes_on_behind_what_a_broker_takes_and_aiokafka_does_not(
    kafka: LogSettings, broker_folder: Path
) -> None:
    """A header's name that is no UTF-8, and a batch that is damaged on the broker's disk."""
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
    found = await read_all(kafka, "prompts")
    assert found[:2] == [(0, b"first"), (1, b"odd")]
    assert found[2] == (3, "offsets 2 to 3 cannot be read: its checksum is wrong")
    assert found[3:] == [(4, b"last")]


@pytest.mark.kafka
async def test_a_reader_misses_nothing_beside_a_partition_that_aiokafka_does_not_read(
    kafka: LogSettings,
) -> None:
    """What it had of the others was dropped with it (found 28)."""
    odd = with_header_name(batch([b"odd"], headers=[("name", b"")]), b"name", b"n\xffme")
    await produce_batch(kafka, "tokens", batch([b"first"]), 0)
    await produce_batch(kafka, "tokens", odd, 1)
    reader = AssignedReader(kafka, "tokens", range(2), client_id="reader")
    async with reader.reading("earliest"):
        found = {(each.partition, each.value) for each in await reader.read_to_end()}
    assert found == {(0, b"first"), (1, b"odd")}


def test_what_stands_for_a_batch_decodes_to_why_it_cannot_be_read() -> None:
    (record,) = DefaultRecordBatch(readable(packed(batch(), "zstd", records=b"x"), 0).data)
    with pytest.raises(RecordError, match="offset 0 cannot be read: zstd: "):
        Codec().decode(record.value)
