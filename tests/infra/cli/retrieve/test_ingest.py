"""`trivium ingest` on a real broker, with an embedding worker beside it."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from schemas.settings import LogSettings
from tests.infra.cli.running import trivium_here
from tests.long_leases import long_leases
from tests.waiting import until
from tests.workers.embed.bookshelf import Bookshelf, bookshelf, worker
from tests.workers.search.service.library import calm
from tests.workers.search.service.library import worker as searcher

pytestmark = pytest.mark.kafka


@pytest.fixture(autouse=True)
async def calm_members() -> AsyncIterator[None]:
    with long_leases():
        yield


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    (folder / "more").mkdir(parents=True)
    (folder / "ferry.md").write_text("# Ferries\n\nThe Ondry ferry leaves from pier 7.\n")
    (folder / "more" / "bread.html").write_text("<title>Bread</title><p>Flour and salt.</p>")
    (folder / "lines.jsonl").write_text('{"id": "a", "text": "One."}\n{"id": "b", "text": "Two."}')
    return folder


def variables(log: LogSettings) -> dict[str, str]:
    values = dataclasses.asdict(log).items()
    return {f"TRIVIUM_LOG_{name.upper()}": str(value) for name, value in values if value}


async def ingested(log: LogSettings, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, what was told, and what was said of what went wrong."""
    code, out, err = await asyncio.to_thread(
        trivium_here, "ingest", *arguments, "-c", "books", "--json", env=variables(log)
    )
    return code, json.loads(out) if out else {}, err


async def test_a_folder_is_ingested_edited_and_cleared_away(kafka: LogSettings, docs: Path) -> None:
    """The same content again embeds nothing, and that is shown."""
    async with bookshelf(kafka) as books, worker(kafka, "e"):
        code, told, err = await ingested(kafka, str(docs), "--metadata", '{"site": "port"}')
        assert code == 0, err
        assert (told["documents"], told["embedded"], told["waiting"]) == (4, 4, 0)
        found = await books.passages()
        assert set(found) == {f"books/{n}" for n in ("ferry.md", "more/bread.html", "a", "b")}
        facts = json.loads(found["books/more/bread.html"].metadata)
        assert (facts["title"], facts["site"]) == ("Bread", "port")
        assert facts["source"].endswith("docs/more/bread.html")
        assert await books.texts("more/bread.html") == ["Flour and salt."]
        code, told, _ = await ingested(kafka, str(docs), "--metadata", '{"site": "port"}')
        assert (code, told["unchanged"], told["embedded"], told["waiting"]) == (0, 4, 0, 0)
        os.utime(docs / "ferry.md", (1, 1))
        (docs / "lines.jsonl").write_text('{"id": "a", "text": "One."}\n{"id": "b", "text": "3."}')
        code, told, _ = await ingested(kafka, str(docs))
        assert (code, told["unchanged"], told["embedded"], told["passages"]) == (0, 3, 1, 1)
        assert json.loads((await books.passages())["books/ferry.md"].metadata)["mtime"] == 1
        await books.drop("b")
        await books.shows("b")


async def test_what_cannot_be_ingested_is_named_and_the_rest_goes_on(
    kafka: LogSettings, docs: Path
) -> None:
    """Bad input; the rest is ingested, and the exit code says so."""
    (docs / "empty.txt").write_text(" ")
    (docs / "picture.png").write_bytes(b"\x89PNG")
    (docs / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    async with bookshelf(kafka) as books, worker(kafka, "e"):
        many = "。" + "海" * 5_000
        (docs / "sea.txt").write_text(many * 8)
        code, told, err = await ingested(kafka, str(docs))
        assert code == 1 and told["embedded"] == 4 and told["waiting"] == 0
        refused = {Path(each["path"]).name: each["reason"] for each in told["refused"]}
        assert set(refused) == {"empty.txt", "picture.png", "bad.txt", "sea.txt"}
        assert "expected at most 4096 passages" in refused["sea.txt"], "told by the worker"
        for name in ("empty.txt", "picture.png", "bad.txt"):
            assert f"{name}: {refused[name]}" in err
        assert len(await books.passages()) == 4


async def test_what_an_index_refuses_is_counted(kafka: LogSettings, tmp_path: Path) -> None:
    """Each call is right by itself; the collection holds another kind."""
    old, new, more = (tmp_path / name for name in ("old.jsonl", "new.jsonl", "more.jsonl"))
    old.write_text('{"id": "a", "text": "One.", "metadata": {"v": "x"}}')
    new.write_text('{"id": "b", "text": "Two.", "metadata": {"v": 5}}\n{"id": "c", "text": "3."}')
    more.write_text('{"id": "a", "text": "One.", "metadata": {"v": 5}}')
    async with calm(), bookshelf(kafka), worker(kafka, "e"), searcher(kafka, "r"):
        code, told, err = await ingested(kafka, str(old))
        assert (code, told["documents"], told["embedded"]) == (0, 1, 1), err
        code, told, err = await ingested(kafka, str(new))
        assert (code, told["documents"], told["embedded"], told["waiting"]) == (1, 1, 1, 0)
        (refused,) = told["refused"]
        assert refused["path"] == "b" and "in field 'v', as others have it" in refused["reason"]
        code, told, err = await ingested(kafka, str(more))
        assert (code, told["documents"], told["unchanged"]) == (0, 1, 1), "nobody has the old kind"


async def test_wrong_arguments_and_missing_workers_are_told(kafka: LogSettings, docs: Path) -> None:
    code, told, err = await ingested(kafka, str(docs))
    assert code == 1 and told["documents"] == told["waiting"] == 4
    assert "no embedding worker is there: the documents wait on the log" in err
    code, told, err = await ingested(kafka, str(docs), "--no-wait")
    assert (code, told["documents"], err) == (0, 4, "")
    for arguments, said in (
        (["nowhere"], "nowhere: no such file or folder"),
        ([str(docs), "--metadata", "[]"], "--metadata: expected a JSON object"),
        ([str(docs), "--metadata", "{"], "--metadata: expected a JSON object"),
        ([str(docs), "--collection", "a/b"], "characters without a slash"),
    ):
        last = ["--collection", "books"] if "--collection" not in arguments else []
        code, _, err = await asyncio.to_thread(
            trivium_here, "ingest", *arguments, *last, env=variables(kafka)
        )
        assert code == 2 and said in err


@contextmanager
def watching(log: LogSettings, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "infra.cli.app", "ingest", *arguments, "--watch"]
    running = subprocess.Popen(
        [*command, "-c", "books"],
        env={**os.environ, **variables(log)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield running
    finally:
        running.kill()
        running.wait()
        assert running.stdout is not None
        running.stdout.close()


async def test_watched_files_are_followed(kafka: LogSettings, docs: Path) -> None:
    """With --watch changed files are written again, deleted ones get a tombstone."""
    async with bookshelf(kafka) as books, worker(kafka, "e"):
        with watching(kafka, str(docs)) as running:
            lines = await _said(running, "watching")
            assert lines[0].startswith("collection books: documents 4, embedded 4 (4 passages)")
            (docs / "ferry.md").write_text("The ferry rests.")
            await books.shows("ferry.md", "The ferry rests.")
            (docs / "new.txt").write_text("Something new.")
            await books.shows("new.txt", "Something new.")
            (docs / "lines.jsonl").write_text('{"id": "a", "text": "One."}')
            await books.shows("b")
            (docs / "more" / "bread.html").unlink()
            await books.shows("more/bread.html")
            await _said(running, "deleted: more/bread.html")
            assert await _keys(books) == {"ferry.md", "new.txt", "a"}
            running.send_signal(signal.SIGINT)
            await until(lambda: running.poll() is not None)
            assert running.returncode == 0


async def _said(running: "subprocess.Popen[str]", begin: str) -> list[str]:
    """Lines up to one that begins so."""
    assert running.stdout is not None
    lines: list[str] = []
    while not (lines and lines[-1].startswith(begin)):
        line = await asyncio.to_thread(running.stdout.readline)
        assert line, lines
        lines.append(line)
    return lines


async def _keys(books: Bookshelf) -> set[str]:
    return {key.partition("/")[2] for key in await books.passages()}
