"""What files say, asked of a process that none of them holds for others."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from schemas.errors import TooManyRequests
from schemas.records import StoredFile
from streams.calls.request.check_process import CheckProcess
from streams.openai.indexing import parsing
from streams.openai.indexing.reading import WAITING_MAX, Unusable, texts_of
from tests.streams.openai.objects.test_table import file

SLOW, QUICK = "tests.streams.openai.indexing.slow_parsing", b"quick"


async def parts(data: bytes) -> AsyncIterator[bytes]:
    yield data


def of(name: str, tenant: str) -> StoredFile:
    return file(name, tenant=tenant, filename="a.txt")


async def test_slow_file_is_not_parsed_twice() -> None:
    parser = CheckProcess(SLOW, "reading the file")
    try:
        for _ in range(2):
            with pytest.raises(Unusable, match="reading the file took more than 50 ms"):
                await texts_of(of("file-slow", "bob"), parts(b"slow"), 50, parser)
        (text,) = await texts_of(of("file-1", "bob"), parts(QUICK), 60_000, parser)
        assert text.text == "quick, after 0 slow ones", "the process that was ended is another one"
    finally:
        parser.close()


async def test_slow_files_of_one_tenant_do_not_delay_others() -> None:
    """80 kB of HTML must not stop the vector stores of all tenants."""
    parser = CheckProcess(SLOW, "reading the file")
    try:
        bobs = [
            asyncio.create_task(texts_of(of(f"file-b{n}", "bob"), parts(b"slow"), 600_000, parser))
            for n in range(WAITING_MAX)
        ]
        (text,) = await texts_of(of("file-a", "alice"), parts(QUICK), 60_000, parser)
        assert text.text.startswith("quick") and not any(task.done() for task in bobs)
        with pytest.raises(TooManyRequests, match="calls for reading the file wait"):
            await texts_of(of("file-b", "bob"), parts(QUICK), 60_000, parser)
        for task in bobs:  # their clients have hung up: the slow one is ended, the others not begun
            task.cancel()
        await asyncio.wait(bobs)
        (text,) = await texts_of(of("file-c", "bob"), parts(QUICK), 60_000, parser)
        assert text.text == "quick, after 0 slow ones"
    finally:
        parser.close()


def test_parser_limits_documents_per_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document costs the gateway more than its text."""
    monkeypatch.setattr(parsing, "TEXTS_MAX", 3)
    path = tmp_path / "a.jsonl"
    for count in (3, 4):
        path.write_text("".join(f'{{"id": {n}, "text": "word {n}"}}\n' for n in range(count)))
        documents = list(parsing.documents(str(path), path.name))
        assert len(documents) == (3 if count == 3 else 1)
    wrong = "expected at most 3 documents in a file, found 4; divide it"
    assert documents == [{"code": "invalid_file", "wrong": wrong}]


async def test_parser_splits_long_texts_into_pieces(tmp_path: Path) -> None:
    """One long line must not block the threads of the gateway."""
    texts = ["a" * 600_000, "short", "\u00e4" * parsing.LINE_CHARS, " ", "\U0001f600 b" * 200_000]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"id": "1", "text": text}) + "\n" for text in texts))
    documents = list(parsing.documents(str(path), path.name))
    assert max(len(json.dumps(item)) for item in documents) <= 12 * parsing.LINE_CHARS + 200
    parser = CheckProcess("streams.openai.indexing.parsing", "reading the file")
    try:
        reading = texts_of(file(filename="a.jsonl"), parts(path.read_bytes()), 60_000, parser)
        assert [document.text for document in await reading] == [
            text for text in texts if text.strip()
        ]
    finally:
        parser.close()
