"""Reads the lines of a stored file, from any line on; at most one part of it is in memory."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

from schemas.records import StoredFile
from streams.log.slices import Slices
from streams.openai.batches.lines import LINE_BYTES_MAX, BatchFileError, BatchLine
from streams.openai.objects.log import PART_BYTES, Objects

LINES_READ_MAX = 1_000_000  # blank lines count, although no batch uses them


async def lines_of(
    objects: Objects, file: StoredFile, first_byte: int = 0
) -> AsyncGenerator[BatchLine]:
    """Yield the lines from the one that begins at `first_byte`.

    Raises BatchFileError for a line that is too long, and the errors of reading the log.
    """
    skipped, within = divmod(first_byte, PART_BYTES)
    rest = replace(file, parts=file.parts[skipped:])
    number, at, slices = 0, first_byte, Slices()
    async with contextlib.aclosing(_split(objects.read_parts(rest), within)) as texts:
        async for text in texts:
            number, at = number + 1, at + len(text)
            await slices.turn()
            if number > LINES_READ_MAX:
                message = (
                    f"Expected at most {LINES_READ_MAX} lines with the blank ones, found more."
                )
                raise BatchFileError("too_many_tasks", message)
            if text.strip():
                yield BatchLine(number, text, at)


async def _split(parts: AsyncIterator[bytes], skipped: int) -> AsyncGenerator[bytes]:
    """Split the parts into lines that keep their ends."""
    tail = b""
    async with contextlib.aclosing(parts):  # type: ignore[type-var]  # every reader is a generator
        async for part in parts:
            *lines, tail = (tail + part[skipped:]).split(b"\n")
            skipped = 0
            for line in lines:
                yield line + b"\n"
            if len(tail) > LINE_BYTES_MAX:
                raise BatchFileError(
                    "line_too_long", f"Expected at most {LINE_BYTES_MAX} bytes, found more."
                )
    if tail:
        yield tail
