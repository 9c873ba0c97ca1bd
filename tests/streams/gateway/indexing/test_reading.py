"""What files say, asked of a process that none of them holds for others."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from schemas.errors import TooManyRequests
from schemas.records import StoredFile
from streams.gateway.indexing import parsing
from streams.gateway.indexing.reading import WAITING_MAX, Unusable, texts_of
from streams.gateway.request.check_process import CheckProcess
from tests.streams.gateway.objects.test_table import file

SLOW, QUICK = "tests.streams.gateway.indexing.slow_parsing", b"quick"


async def parts(data: bytes) -> AsyncIterator[bytes]:
    yield data


def of(name: str, tenant: str) -> StoredFile:
    return file(name, tenant=tenant, filename="a.txt")


async def test_a_file_that_was_too_slow_is_not_read_again() -> None:
    one = CheckProcess(SLOW, "reading the file")
    try:
        for _ in range(2):
            with pytest.raises(Unusable, match="reading the file took more than 50 ms"):
                await texts_of(of("file-slow", "bob"), parts(b"slow"), 50, one)
        (text,) = await texts_of(of("file-1", "bob"), parts(QUICK), 60_000, one)
        assert text.text == "quick, after 0 slow ones", "the process that was ended is another one"
    finally:
        one.close()


async def test_one_tenants_slow_files_keep_nobody_else_waiting() -> None:
    """80 kB of HTML stopped the vector stores of all tenants (found 28)."""
    one = CheckProcess(SLOW, "reading the file")
    try:
        bobs = [
            asyncio.create_task(texts_of(of(f"file-b{n}", "bob"), parts(b"slow"), 600_000, one))
            for n in range(WAITING_MAX)
        ]
        (text,) = await texts_of(of("file-a", "alice"), parts(QUICK), 60_000, one)
        assert text.text.startswith("quick") and not any(task.done() for task in bobs)
        with pytest.raises(TooManyRequests, match="calls for reading the file wait"):
            await texts_of(of("file-b", "bob"), parts(QUICK), 60_000, one)
        for task in bobs:  # their clients have hung up: the slow one is ended, the others not begun
            task.cancel()
        await asyncio.wait(bobs)
        (text,) = await texts_of(of("file-c", "bob"), parts(QUICK), 60_000, one)
        assert text.text == "quick, after 0 slow ones"
    finally:
        one.close()


def test_a_file_has_so_many_documents_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs the gateway more than its text (found 28)."""
    monkeypatch.setattr(parsing, "TEXTS_MAX", 3)
    path = tmp_path / "a.jsonl"
    for count in (3, 4):
        path.write_text("".join(f'{{"id": {n}, "text": "word {n}"}}\n' for n in range(count)))
        said = list(parsing.documents(str(path), path.name))
        assert len(said) == (3 if count == 3 else 1)
    wrong = "expected at most 3 documents in a file, found 4; divide it"
    assert said == [{"code": "invalid_file", "wrong": wrong}]


async def test_a_long_text_comes_in_pieces(tmp_path: Path) -> None:
    """One line of it held all threads of the gateway for a second (review of 28)."""
    texts = ["a" * 600_000, "short", "\u00e4" * parsing.LINE_CHARS, " ", "\U0001f600 b" * 200_000]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"id": "1", "text": text}) + "\n" for text in texts))
    said = list(parsing.documents(str(path), path.name))
    assert max(len(json.dumps(item)) for item in said) <= 12 * parsing.LINE_CHARS + 200
    one = CheckProcess("streams.gateway.indexing.parsing", "reading the file")
    try:
        reading = texts_of(file(filename="a.jsonl"), parts(path.read_bytes()), 60_000, one)
        assert [each.text for each in await reading] == [each for each in texts if each.strip()]
    finally:
        one.close()
