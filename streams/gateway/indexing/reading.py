"""What an uploaded file says: asked of a process that no file can hang the gateway with."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass

from schemas.errors import InvalidRequest
from schemas.records import StoredFile
from streams.gateway.request.check_process import CheckProcess
from streams.parsing.parsed import INVALID, Unreadable

FILE_PROCESS = CheckProcess("streams.gateway.indexing.parsing", "reading the file")


class Unusable(Unreadable):
    """A file that gives no document; `code` is OpenAI's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Text:
    """What a file, or a line of it, says."""

    title: str
    text: str


async def texts_of(file: StoredFile, parts: AsyncIterator[bytes], limit_ms: int) -> list[Text]:
    """In order; raises Unusable, and TooManyRequests where too many files wait."""
    with tempfile.NamedTemporaryFile() as copy:
        async for part in parts:
            await asyncio.to_thread(copy.write, part)
        copy.flush()
        try:
            found = await FILE_PROCESS.ask("documents", copy.name, file.filename, limit_ms=limit_ms)
        except InvalidRequest as error:
            raise Unusable(INVALID, error.message) from error
    if "wrong" in found:
        raise Unusable(found["code"], found["wrong"][:1_000])
    for each in found["documents"]:
        if each["wrong"]:
            raise Unusable(INVALID, f"{each['place']}: {each['wrong']}"[:1_000])
    said = [Text(each["title"], each["text"]) for each in found["documents"]]
    return [text for text in said if text.text.strip()]
