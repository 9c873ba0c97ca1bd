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
from tests.infra.cli.trivium_runner import trivium_here
from tests.long_leases import long_leases
from tests.waits import until
from tests.workers.embed.bookshelf import Bookshelf, bookshelf, worker
from tests.workers.retrieval.retrieval_workers import calm
from tests.workers.retrieval.retrieval_workers import worker as searcher

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
    """Exit code, the summary on stdout, and the text on stderr."""
    code, out, err = await asyncio.to_thread(
        trivium_here, "ingest", *arguments, "-c", "books", "--json", env=variables(log)
    )
    return code, json.loads(out) if out else {}, err


async def test_ingest_command_adds_edits_and_deletes_documents(
    kafka: LogSettings, docs: Path
) -> None:
    """Unchanged content is not embedded again, and the summary counts it."""
    async with bookshelf(kafka) as books, worker(kafka, "e"):
        code, summary, err = await ingested(kafka, str(docs), "--metadata", '{"site": "port"}')
        assert code == 0, err
        assert (summary["documents"], summary["embedded"], summary["waiting"]) == (4, 4, 0)
        passages = await books.passages()
        assert set(passages) == {f"books/{n}" for n in ("ferry.md", "more/bread.html", "a", "b")}
        facts = json.loads(passages["books/more/bread.html"].metadata)
        assert (facts["title"], facts["site"]) == ("Bread", "port")
        assert facts["source"].endswith("docs/more/bread.html")
        assert await books.texts("more/bread.html") == ["Flour and salt."]
        code, summary, _ = await ingested(kafka, str(docs), "--metadata", '{"site": "port"}')
        assert (code, summary["unchanged"], summary["embedded"], summary["waiting"]) == (0, 4, 0, 0)
        os.utime(docs / "ferry.md", (1, 1))
        (docs / "lines.jsonl").write_text('{"id": "a", "text": "One."}\n{"id": "b", "text": "3."}')
        code, summary, _ = await ingested(kafka, str(docs))
        assert (code, summary["unchanged"], summary["embedded"], summary["passages"]) == (
            0,
            3,
            1,
            1,
        )
        assert json.loads((await books.passages())["books/ferry.md"].metadata)["mtime"] == 1
        await books.drop("b")
        await books.shows("b")


async def test_ingest_command_names_bad_files_and_ingests_others(
    kafka: LogSettings, docs: Path
) -> None:
    """The exit code is 1 where a file was refused."""
    (docs / "empty.txt").write_text(" ")
    (docs / "picture.png").write_bytes(b"\x89PNG")
    (docs / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    async with bookshelf(kafka) as books, worker(kafka, "e"):
        many = "。" + "海" * 5_000
        (docs / "sea.txt").write_text(many * 8)
        code, summary, err = await ingested(kafka, str(docs))
        assert code == 1 and summary["embedded"] == 4 and summary["waiting"] == 0
        refused = {Path(refusal["path"]).name: refusal["reason"] for refusal in summary["refused"]}
        assert set(refused) == {"empty.txt", "picture.png", "bad.txt", "sea.txt"}
        assert "expected at most 4096 passages" in refused["sea.txt"], "told by the worker"
        for name in ("empty.txt", "picture.png", "bad.txt"):
            assert f"{name}: {refused[name]}" in err
        assert len(await books.passages()) == 4


async def test_ingest_command_counts_documents_refused_by_index(
    kafka: LogSettings, tmp_path: Path
) -> None:
    """Each call is valid by itself; the collection has another type in the field."""
    old, new, correction = (tmp_path / name for name in ("old.jsonl", "new.jsonl", "more.jsonl"))
    old.write_text('{"id": "a", "text": "One.", "metadata": {"v": "x"}}')
    new.write_text('{"id": "b", "text": "Two.", "metadata": {"v": 5}}\n{"id": "c", "text": "3."}')
    correction.write_text('{"id": "a", "text": "One.", "metadata": {"v": 5}}')
    async with calm(), bookshelf(kafka), worker(kafka, "e"), searcher(kafka, "r"):
        code, summary, err = await ingested(kafka, str(old))
        assert (code, summary["documents"], summary["embedded"]) == (0, 1, 1), err
        code, summary, err = await ingested(kafka, str(new))
        assert (code, summary["documents"], summary["embedded"], summary["waiting"]) == (1, 1, 1, 0)
        (refused,) = summary["refused"]
        assert refused["path"] == "b" and "in field 'v', as others have it" in refused["reason"]
        code, summary, err = await ingested(kafka, str(correction))
        assert (code, summary["documents"], summary["unchanged"]) == (0, 1, 1), (
            "nobody has the old kind"
        )


async def test_ingest_command_reports_bad_arguments_and_missing_workers(
    kafka: LogSettings, docs: Path
) -> None:
    code, summary, err = await ingested(kafka, str(docs))
    assert code == 1 and summary["documents"] == summary["waiting"] == 4
    assert "no embedding worker is alive: the documents wait on the log" in err
    code, summary, err = await ingested(kafka, str(docs), "--no-wait")
    assert (code, summary["documents"], err) == (0, 4, "")
    for arguments, message in (
        (["nowhere"], "nowhere: no such file or folder"),
        ([str(docs), "--metadata", "[]"], "--metadata: expected a JSON object"),
        ([str(docs), "--metadata", "{"], "--metadata: expected a JSON object"),
        ([str(docs), "--collection", "a/b"], "characters without a slash"),
    ):
        last = ["--collection", "books"] if "--collection" not in arguments else []
        code, _, err = await asyncio.to_thread(
            trivium_here, "ingest", *arguments, *last, env=variables(kafka)
        )
        assert code == 2 and message in err


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


async def test_ingest_watch_follows_file_changes(kafka: LogSettings, docs: Path) -> None:
    """With --watch, changed files are written again and deleted ones get a tombstone."""
    async with bookshelf(kafka) as books, worker(kafka, "e"):
        with watching(kafka, str(docs)) as running:
            lines = await _lines_until(running, "watching")
            assert lines[0].startswith("collection books: documents 4, embedded 4 (4 passages)")
            (docs / "ferry.md").write_text("The ferry rests.")
            await books.shows("ferry.md", "The ferry rests.")
            (docs / "new.txt").write_text("Something new.")
            await books.shows("new.txt", "Something new.")
            (docs / "lines.jsonl").write_text('{"id": "a", "text": "One."}')
            await books.shows("b")
            (docs / "more" / "bread.html").unlink()
            await books.shows("more/bread.html")
            await _lines_until(running, "deleted: more/bread.html")
            assert await _keys(books) == {"ferry.md", "new.txt", "a"}
            running.send_signal(signal.SIGINT)
            await until(lambda: running.poll() is not None)
            assert running.returncode == 0


async def _lines_until(running: "subprocess.Popen[str]", begin: str) -> list[str]:
    """Lines of output up to the first one that begins with this text."""
    assert running.stdout is not None
    lines: list[str] = []
    while not (lines and lines[-1].startswith(begin)):
        line = await asyncio.to_thread(running.stdout.readline)
        assert line, lines
        lines.append(line)
    return lines


async def _keys(books: Bookshelf) -> set[str]:
    return {key.partition("/")[2] for key in await books.passages()}
