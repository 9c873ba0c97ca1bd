"""Lines of files that lie in parts."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from schemas.records import StoredFile
from streams.openai.batches.lines import BatchFileError, BatchLine, lines_of
from tests.streams.gateway.memory_objects import MemoryObjects

FILE = StoredFile(
    file_id="file-1",
    filename="a.jsonl",
    purpose="batch",
    bytes=1,
    created_ms=1,
    state="stored",
    partition=0,
)


async def stored(objects: MemoryObjects, data: bytes, part_bytes: int) -> StoredFile:
    async def parts() -> AsyncIterator[bytes]:
        for first in range(0, len(data), part_bytes):
            yield data[first : first + part_bytes]

    offsets = await objects.write_parts(FILE, parts())
    return replace(FILE, parts=tuple(offsets))


async def read(objects: MemoryObjects, file: StoredFile, first_byte: int = 0) -> list[BatchLine]:
    async with contextlib.aclosing(lines_of(objects, file, first_byte)) as lines:
        return [line async for line in lines]


@pytest.mark.parametrize("part_bytes", [1, 2, 3, 7, 100])
async def test_lines_are_equal_for_all_part_sizes(
    monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    """Reading may begin at the end of any line and yields those that follow."""
    monkeypatch.setattr("streams.openai.batches.lines.PART_BYTES", part_bytes)
    objects, data = MemoryObjects(), b"\none\r\n\n  \ntwo\nthree"
    file = await stored(objects, data, part_bytes)
    lines = await read(objects, file)
    assert [(line.number, line.text.strip()) for line in lines] == [
        (2, b"one"),
        (5, b"two"),
        (6, b"three"),
    ]
    for index, line in enumerate(lines):
        rest = await read(objects, file, line.end)
        assert [batch_line.text for batch_line in rest] == [
            batch_line.text for batch_line in lines[index + 1 :]
        ]
        assert [batch_line.end for batch_line in rest] == [
            batch_line.end for batch_line in lines[index + 1 :]
        ]


async def test_reading_rejects_line_over_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streams.openai.batches.lines.LINE_BYTES_MAX", 10)
    objects = MemoryObjects()
    file = await stored(objects, b"short\n" + b"x" * 40, 4)
    with pytest.raises(BatchFileError) as error:
        await read(objects, file)
    assert error.value.code == "line_too_long"
