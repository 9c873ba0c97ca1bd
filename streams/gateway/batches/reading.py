"""The lines of a stored file, from any of them on; no more than a part of it is held."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

from schemas.log.slices import Slices
from schemas.records import StoredFile
from streams.gateway.batches.lines import LINE_BYTES_MAX, BatchFileError, BatchLine
from streams.gateway.log.objects import PART_BYTES, Objects

LINES_READ_MAX = 1_000_000  # blank ones, too, which no batch has any use for


async def lines_of(
    objects: Objects, file: StoredFile, first_byte: int = 0
) -> AsyncGenerator[BatchLine]:
    """From the line that begins there; raises Wrong for one that is too long, whose parts come as
    they were uploaded, and what reading the log may raise.
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
