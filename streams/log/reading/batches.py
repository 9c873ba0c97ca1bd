"""Makes fetched batches readable for aiokafka, which never gets past a batch that it cannot read.

Such a batch is damaged, or has an unknown codec, or a header whose name is not UTF-8, which brokers
accept. Compressed batches are unpacked here, within a bound: a few kilobytes may stand for
gigabytes. An unreadable batch becomes one record at its last offset, whose value has the reason
(`unreadable_value`). So its reader dead-letters it, as any undecodable record, and continues.

Theory of operation. If the checksum of a batch is wrong, no field of it is trusted. The batch ends
where the next one begins, if that one is whole, or where two of its own numbers agree; otherwise it
is skipped offset by offset. Batches that are not compressed are only stepped over, so that reading
costs no more than before; once aiokafka has met an unreadable batch, all are checked (`closely`).
Formats before version 2, which no broker has written since Kafka 3, are left as they are. Pure.
Called by `streams/log/reading/fetching.py`.
"""

import codecs
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from gzip import GzipFile
from io import BytesIO
from mmap import mmap
from typing import NamedTuple

import cramjam
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c, decode_varint

from schemas.codec import unreadable_value

UNPACKED_BYTES_MAX = 64 << 20  # of a batch, eight times the largest record; and of a fetch
_PREFIX = struct.Struct(">qi")  # in every version: first offset, bytes that follow
_HEAD = struct.Struct(">ibIhiqqqhii")  # in version 2: the fields of `_Head`
_RECORDS_AT = _PREFIX.size + _HEAD.size
_VERSION_AT, _CHECKSUM_AT, _ATTRIBUTES_AT = 16, 17, 21
_LEAST_BYTES = 14  # after the prefix, in the oldest version
_VERSION, _CODEC, _TRANSACTIONAL = 2, 0b111, 0b1_0000
_XERIAL, _XERIAL_BYTES = (
    b"\x82SNAPPY\0",
    16,
)  # begins a stream of snappy blocks, each with its length
_AS_LONG = "trivium.as_long"  # error handler for header names that are not UTF-8
_IS_FILLED = "failed to write whole buffer"  # cramjam's message for a full buffer


class _Head(NamedTuple):
    """The header fields of a batch of version 2, after the prefix."""

    epoch: int
    version: int
    checksum: int
    attributes: int
    last_delta: int  # its last offset minus its first
    first_ms: int
    last_ms: int
    producer_id: int
    producer_epoch: int
    sequence: int
    records: int


_UNKNOWN = _Head(0, _VERSION, 0, 0, 0, -1, -1, -1, -1, -1, 1)


@dataclass(frozen=True, slots=True)
class UnreadableRange:
    """Offsets of a partition that are unreadable, and why."""

    first: int
    last: int
    why: str

    def __str__(self) -> str:
        offsets = f"offset {self.last}"
        if self.first < self.last:
            offsets = f"offsets {self.first} to {self.last}"
        return f"{offsets} cannot be read: {self.why}"


class Readable(NamedTuple):
    """A partition's share of a fetch, readable for aiokafka."""

    data: bytes
    passed_over: list[UnreadableRange]
    unpacked_bytes: int


class _Unreadable(Exception):
    pass


def readable(
    data: bytes, offset: int, *, closely: bool = False, budget_bytes: int = UNPACKED_BYTES_MAX
) -> Readable:
    """Return a readable form of a partition's fetched data, which begin at `offset`.

    Unpacks at most `budget_bytes`: the next fetch brings the rest.
    """
    parts, passed_over, copied, unpacked = list[bytes](), list[UnreadableRange](), 0, 0
    for at, end in _batches(data):
        if end == 0 and at == 0:
            gap = UnreadableRange(offset, offset, "the length of its batch is damaged")
            return Readable(_placeholder(gap, _UNKNOWN), [gap], 0)
        if end == 0:  # the next fetch begins with this batch
            return Readable(b"".join((*parts, data[copied:at])), passed_over, unpacked)
        packed = data[at + _ATTRIBUTES_AT + 1] & _CODEC
        if data[at + _VERSION_AT] != _VERSION or not (packed or closely):
            continue
        if packed and unpacked >= budget_bytes:
            return Readable(b"".join((*parts, data[copied:at])), passed_over, unpacked)
        batch = _RecordBatch(data[at:end])
        try:
            plain = batch.plain(closely=closely)
        except _Unreadable as error:
            gap = batch.unreadable_range(max(offset, batch.first), data[end:], str(error))
            plain = batch.placeholder_for(gap)
            passed_over.append(gap)
            unpacked += UNPACKED_BYTES_MAX if packed else 0  # upper bound
        unpacked += len(plain) if packed else 0
        parts += data[copied:at], plain
        copied = end
    return Readable(b"".join((*parts, data[copied:])) if parts else data, passed_over, unpacked)


def needs_mending(data: bytes) -> bool:
    """Return whether any batch of a partition's share is compressed, or has an invalid length."""
    return any(
        not end or (data[at + _VERSION_AT] == _VERSION and data[at + _ATTRIBUTES_AT + 1] & _CODEC)
        for at, end in _batches(data)
    )


def _batches(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield where each batch begins and ends; after one of invalid length, with end 0, stop.

    A broker truncates the last batch; only the first one is always whole, however large it is.
    """
    at, whole = 0, len(data)
    while whole - at >= _PREFIX.size:
        end = at + _PREFIX.size + _PREFIX.unpack_from(data, at)[1]
        if end < at + _PREFIX.size + _LEAST_BYTES or end > whole:
            if at == 0 or end <= whole:
                yield at, 0
            return
        yield at, end
        at = end


class _RecordBatch:
    """A record batch of version 2, as it is in the log."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.first, _ = _PREFIX.unpack_from(data)
        head = data[_PREFIX.size : _RECORDS_AT].ljust(_HEAD.size, b"\0")
        self.head = _Head(*_HEAD.unpack(head))
        self.is_whole = len(data) >= _RECORDS_AT and self.head.checksum == calc_crc32c(
            data[_ATTRIBUTES_AT:]
        )

    def plain(self, *, closely: bool) -> bytes:
        """Return the batch without compression, with header names in UTF-8. Raise _Unreadable."""
        if not self.is_whole:
            raise _Unreadable("its checksum is wrong")
        records = self._data[_RECORDS_AT:]
        if codec := self.head.attributes & _CODEC:
            records = _decompress(codec, records)
        plain = self._with(records)
        if not closely:
            return plain
        try:
            deque(DefaultRecordBatch(plain), maxlen=0)
            return plain
        except UnicodeDecodeError:
            return self._with(_with_names(records, self.head.records))
        except Exception as error:  # aiokafka raises several kinds
            raise _Unreadable(f"{type(error).__name__}: {error}") from error

    def _with(self, records: bytes) -> bytes:
        attributes = self.head.attributes & ~_CODEC
        head = _HEAD.pack(*self.head._replace(checksum=0, attributes=attributes))
        data = bytearray(_PREFIX.pack(self.first, len(head) + len(records)) + head + records)
        struct.pack_into(">I", data, _CHECKSUM_AT, calc_crc32c(bytes(data[_ATTRIBUTES_AT:])))
        return bytes(data)

    def unreadable_range(self, first: int, behind: bytes, why: str) -> UnreadableRange:
        """Return the offsets that are lost with the batch; `behind` has the batches after it."""
        last = self.first + self.head.last_delta
        if not self.is_whole:
            _, end = next(_batches(behind), (0, 0))
            following = _RecordBatch(behind[:end]) if end else None
            if following is not None and following.is_whole:
                last = following.first - 1
            elif self.head.last_delta != self.head.records - 1:
                last = first
        return UnreadableRange(first, max(first, last), why)

    def placeholder_for(self, gap: UnreadableRange) -> bytes:
        """Return one record in its place, of the same transaction if that is known."""
        return _placeholder(gap, self.head if self.is_whole else _UNKNOWN)


def _placeholder(gap: UnreadableRange, head: _Head) -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=_VERSION,
        compression_type=0,
        is_transactional=bool(head.attributes & _TRANSACTIONAL),
        producer_id=head.producer_id,
        producer_epoch=head.producer_epoch,
        base_sequence=head.sequence,
        batch_size=UNPACKED_BYTES_MAX,
    )
    builder.append(0, head.last_ms, None, unreadable_value(str(gap)), [])
    data = builder.build()
    struct.pack_into(">q", data, 0, gap.last)  # not part of the checksum
    return bytes(data)


def _with_names(records: bytes, count: int) -> bytes:
    """Return records with header names in UTF-8; each byte that is invalid becomes `?`."""
    data, at = bytearray(records), 0
    for _ in range(count):
        _, at = decode_varint(data, at)  # its length
        at += 1  # its attributes
        for _ in ("time", "offset"):
            _, at = decode_varint(data, at)
        for _ in ("key", "value"):
            size, at = decode_varint(data, at)
            at += max(0, size)
        headers, at = decode_varint(data, at)
        for _ in range(headers):
            size, at = decode_varint(data, at)
            name = data[at : at + size].decode(errors=_AS_LONG)
            data[at : at + size] = name.encode()
            size, at = decode_varint(data, at + size)
            at += max(0, size)
    return bytes(data)


def _as_long(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "?" * (error.end - error.start), error.end


codecs.register_error(_AS_LONG, _as_long)


# Codecs, by their numbers in batches


def _decompress(codec: int, packed: bytes) -> bytes:
    if codec not in _CODECS:
        raise _Unreadable(f"its codec has the number {codec}, which Kafka does not know")
    name, unpack = _CODECS[codec]
    try:
        return unpack(packed)
    except _Unreadable:
        raise
    except Exception as error:
        raise _Unreadable(f"{name}: {error}") from error


def _too_large() -> _Unreadable:
    return _Unreadable(f"it is larger than {UNPACKED_BYTES_MAX} bytes when it is unpacked")


def _gzip(packed: bytes) -> bytes:
    with GzipFile(fileobj=BytesIO(packed)) as file:
        unpacked = file.read(UNPACKED_BYTES_MAX + 1)
    if len(unpacked) > UNPACKED_BYTES_MAX:
        raise _too_large()
    return unpacked


def _snappy(packed: bytes) -> bytes:
    """Decompress a block, or Xerial's stream of blocks, as Java writes it."""
    if not packed.startswith(_XERIAL):
        return _snappy_block(packed, UNPACKED_BYTES_MAX)
    parts, bytes_left, at = list[bytes](), UNPACKED_BYTES_MAX, 0
    while at < len(packed):
        if packed.startswith(_XERIAL, at):  # streams may follow one another
            at += _XERIAL_BYTES
            continue
        (size,) = struct.unpack_from(">i", packed, at)
        parts.append(_snappy_block(packed[at + 4 : at + 4 + max(0, size)], bytes_left))
        bytes_left -= len(parts[-1])
        at += 4 + max(0, size)
    return b"".join(parts)


def _snappy_block(packed: bytes, limit: int) -> bytes:
    if cramjam.snappy.decompress_raw_len(packed) > limit:
        raise _too_large()
    return bytes(cramjam.snappy.decompress_raw(packed))


def _into_buffer(unpack: Callable[[bytes, mmap], int]) -> Callable[[bytes], bytes]:
    """Return a codec that unpacks into memory of which only written pages are allocated."""

    def unpacked(packed: bytes) -> bytes:
        with mmap(-1, UNPACKED_BYTES_MAX) as buffer:
            try:
                return buffer[: unpack(packed, buffer)]
            except cramjam.DecompressionError as error:
                if str(error) == _IS_FILLED:
                    raise _too_large() from error
                raise

    return unpacked


_CODECS: dict[int, tuple[str, Callable[[bytes], bytes]]] = {
    1: ("gzip", _gzip),
    2: ("snappy", _snappy),
    3: ("lz4", _into_buffer(cramjam.lz4.decompress_into)),
    4: ("zstd", _into_buffer(cramjam.zstd.decompress_into)),
}
