"""Reads the texts of uploaded files in child processes, so that no file can block the gateway."""

import asyncio
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from schemas.errors import InvalidRequest
from schemas.records import StoredFile
from streams.calls.request.check_process import CheckProcess, TooSlow
from streams.log.slices import in_slices
from streams.parsing.document import INVALID, ParsedDocument, Unreadable

_MODULE = "streams.openai.indexing.parsing"
FILE_PROCESS = CheckProcess(_MODULE, "reading the file")  # for calls of clients
INDEX_PROCESS = CheckProcess(_MODULE, "reading the file")  # so that calls do not delay the indexer
WAITING_MAX = 8  # calls of a tenant, each with a copy of its file
SLOW_MAX = 1_024  # files that took too long and are not read again
_slow: OrderedDict[tuple[str, int], str] = OrderedDict()  # by id and limit: the error


class Unusable(Unreadable):
    """A file without usable documents; `code` is OpenAI's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class FileText:
    """The text of a file, or of a line of it."""

    title: str
    text: str


async def texts_of(
    file: StoredFile, parts: AsyncIterator[bytes], limit_ms: int, process: CheckProcess
) -> list[FileText]:
    """Return the texts of a file in order.

    Raises Unusable, and TooManyRequests if too many of its tenant's calls wait.
    """
    if (reason := _slow.get((file.file_id, limit_ms))) is not None:
        raise Unusable(INVALID, reason)
    process.check_queue(file.tenant, WAITING_MAX)
    with tempfile.NamedTemporaryFile() as copy:
        async for part in parts:
            await asyncio.to_thread(copy.write, part)
        copy.flush()
        try:
            answer = await process.ask(
                *("documents", copy.name, file.filename),
                limit_ms=limit_ms,
                tenant=file.tenant,
                waiting_max=WAITING_MAX,
            )
        except TooSlow as error:
            _slow[file.file_id, limit_ms] = error.message
            if len(_slow) > SLOW_MAX:
                _slow.popitem(last=False)
            raise Unusable(INVALID, error.message) from error
        except InvalidRequest as error:
            raise Unusable(INVALID, error.message) from error
    documents = await documents_in(answer)
    for document in documents:
        if document.wrong:
            raise Unusable(INVALID, f"{document.place}: {document.wrong}"[:1_000])
    texts = [FileText(document.title, document.text) for document in documents]
    return [text for text in texts if text.text and not text.text.isspace()]


async def documents_in(answer: list[Any]) -> list[ParsedDocument]:
    """Return the documents in an answer of `parsing.py`; raises Unusable."""
    fields, texts = list[dict[str, Any]](), list[list[str]]()
    async for item in in_slices(answer):
        if isinstance(item, str):
            texts[-1].append(item)
        elif "code" in item:
            raise Unusable(item["code"], item["wrong"][:1_000])
        else:
            fields.append(item)
            texts.append([item["text"]])
    pairs = in_slices(zip(fields, texts, strict=True))
    return [
        ParsedDocument(**{**document_fields, "text": "".join(text)})
        async for document_fields, text in pairs
    ]
