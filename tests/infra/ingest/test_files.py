"""What files of each kind become."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pypdf import PdfReader

from infra.ingest import batch, files
from infra.ingest.batch import SourceReader, Target
from infra.ingest.files import FileSource, read, source_of, sources
from schemas.rules.sizes import DOCUMENT_CHARS_MAX
from streams.parsing.document import Unreadable
from tests.streams.parsing.pdfs import pdf_bytes


async def test_pdf_reader_returns_text_and_title(tmp_path: Path) -> None:
    file = tmp_path / "a.pdf"
    file.write_bytes(pdf_bytes("Pier 7.", "Pier 9."))
    (document,) = await read(file)
    assert (document.title, document.text) == ("A paper", "Pier 7.\n\nPier 9.")
    assert len(PdfReader(file).pages) == 2


WRONG: list[tuple[str, bytes, str]] = [
    ("a.bin", b"x", "unknown kind of file; expected text, Markdown"),
    ("a.txt", b"\xff\x00\x80", "expected text, found zero bytes"),
    ("a.md", b"a\0b", "found zero bytes"),
    ("a.pdf", b"no", "expected a PDF: "),
    ("b.pdf", pdf_bytes(""), "found none on 1 pages: a scan"),
    ("c.pdf", pdf_bytes("x", password="secret"), "without a password"),
]


async def test_file_reader_error_names_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, data, reason in WRONG:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(Unreadable, match=reason):
            await read(tmp_path / name)
    with pytest.raises(Unreadable, match="no such file"):
        await read(tmp_path / "none.txt")
    monkeypatch.setattr(files, "FILE_BYTES_MAX", 3)
    (tmp_path / "long.txt").write_text("four")
    with pytest.raises(Unreadable, match="at most 3 bytes, found 4"):
        await read(tmp_path / "long.txt")


async def test_text_reader_detects_encoding_by_mark(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        file.write_bytes("Grüße\r\nan alle".encode(encoding))
        assert (await read(file))[0].text == "Grüße\nan alle"


async def test_jsonl_reader_returns_documents_and_names_bad_lines(tmp_path: Path) -> None:
    lines: list[Any] = [
        {"id": "a", "text": "A text.", "title": "A", "metadata": {"year": 2020}, "tenant": "t"},
        {"id": 7, "text": "Seven."},
        {"text": "No id."},
        {"id": "x"},
        [],
        {"id": "v", "vector": [1]},
        {"id": "m", "text": "m", "metadata": [1]},
        {"id": "a", "text": "again"},
    ]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n{")
    reading = SourceReader(Target(collection="c", tenant="all", metadata={"site": 1}))
    documents, refused = await reading.documents(FileSource(file, "a.jsonl"), 5)
    assert [(document.document_id, document.text, document.tenant) for document in documents] == [
        ("a", "A text.", "t"),
        ("7", "Seven.", "all"),
        ("a.jsonl/3", "No id.", "all"),
    ]
    facts = json.loads(documents[0].metadata)
    assert (facts["title"], facts["year"], facts["site"]) == ("A", 2020, 1)
    assert facts["source"].endswith("a.jsonl") and facts["mtime"] > 0
    assert [refusal.path.rpartition(", ")[2] for refusal in refused] == [
        *(f"line {number}" for number in (4, 5, 6, 7, 8, 10)),
    ]
    for refusal, fragments in zip(
        refused,
        ("a text", "object with", "ingest --vectors", "strings", "taken", "JSON"),
        strict=True,
    ):
        assert any(part in refusal.reason for part in fragments.split("|")), refusal


FACTS: list[tuple[str, str]] = [
    ('{"a": {"b": 1}}', "found an object"),
    ('{"m": [null]}', "found null"),
    ('{"m": [1, "a"]}', "expected a number in field 'm', as others have it, found 'a'"),
    ('{"n": NaN}', "within"),
    ('{"n": 1e999}', "more digits than a float"),
    ('{"tweet": 1234567890123456789}', "store it as text"),
    ('{"s": "\\ud800"}', "half of a pair"),
    ('{"v": 5}', "expected a text or truth value in field 'v', as others have it, found 5"),
    ('{"title": 5}', "field 'title'"),
    ('{"$tenant": "x"}', "is no name for a field"),
    (json.dumps({"long": "x" * 70_000}), "at most 65536 characters"),
    (json.dumps({f"f{number}": 1 for number in range(62)}), "at most 64 fields, found 66"),
]


async def test_reader_refuses_metadata_that_no_index_accepts(tmp_path: Path) -> None:
    """Such documents were dead-lettered unseen by the caller, or failed the whole call."""
    file = tmp_path / "m.jsonl"
    lines = [f'{{"id": "{n}", "text": "x", "metadata": {f}}}' for n, (f, _) in enumerate(FACTS)]
    first = '{"id": "a", "text": "one", "metadata": {"v": "x", "none": null, "tags": []}}'
    file.write_text("\n".join([first, *lines, '{"id": "z", "text": "last"}']))
    documents, refused = await SourceReader(Target(collection="c")).documents(
        FileSource(file, "m.jsonl"), 0
    )
    assert [document.document_id for document in documents] == ["a", "z"]
    for number, ((_, reason), refusal) in enumerate(zip(FACTS, refused, strict=True), 2):
        assert refusal.path.endswith(f"m.jsonl, line {number}") and reason in refusal.reason


async def test_file_reader_times_out_on_slow_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, good = tmp_path / "slow.html", tmp_path / "good.txt"
    slow.write_text("<table><tr><td>" * 200_000)
    good.write_text("Good.")
    monkeypatch.setattr(files, "FILE_MS", 1)
    with pytest.raises(Unreadable, match="reading the file took more than 1 ms"):
        await read(slow)
    monkeypatch.undo()
    assert (await read(good))[0].text == "Good."


async def test_reader_refuses_file_name_outside_utf8(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"caf\xe9.txt")
    file.write_text("x")
    documents, (refusal,) = await SourceReader(Target(collection="c")).documents(
        FileSource(file, file.name), 0
    )
    assert not documents and "a name in UTF-8" in refusal.reason
    assert refusal.path.endswith("caf\ufffd.txt")


def test_source_ids_are_relative_paths_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.md", "a/c.txt", ".git/x.txt", "a/.hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [source.name for source in sources([tmp_path])] == ["b.md", "a/c.txt"]
    assert [source.name for source in sources([tmp_path / "a" / "c.txt"])] == ["c.txt"]
    assert source_of(tmp_path / "a/c.txt", [tmp_path]) == FileSource(
        tmp_path / "a/c.txt", "a/c.txt"
    )
    assert source_of(tmp_path / ".git/x.txt", [tmp_path]) is None
    assert source_of(tmp_path / "b.md", [tmp_path / "a"]) is None
    assert source_of(tmp_path / "b.md", [tmp_path / "b.md"]) == FileSource(
        tmp_path / "b.md", "b.md"
    )


async def test_document_id_belongs_to_first_file_until_forgotten(tmp_path: Path) -> None:
    reading = SourceReader(Target(collection="c"))
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(f"From {folder}.")
    first, second = (FileSource(tmp_path / folder / "a.txt", "a.txt") for folder in ("one", "two"))
    assert len((await reading.documents(first, 0))[0]) == 1
    documents, refused = await reading.documents(second, 0)
    assert not documents and "'a.txt' is taken" in refused[0].reason
    assert len((await reading.documents(first, 0))[0]) == 1, "its own id is not taken"
    assert reading.forget(first.path, ["a.txt"]) == []
    assert reading.forget(tmp_path / "one") == ["a.txt"]
    assert len((await reading.documents(second, 0))[0]) == 1


async def test_reader_refuses_empty_and_long_text_and_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = SourceReader(Target(collection="c"))
    for name, text, reason in (
        ("empty.txt", " \n", "empty: expected a text with words"),
        ("long.txt", "a" * (DOCUMENT_CHARS_MAX + 1), "too large: expected at most"),
    ):
        (tmp_path / name).write_text(text)
        documents, refused = await reading.documents(FileSource(tmp_path / name, name), 0)
        assert not documents and reason in refused[0].reason and refused[0].path.endswith(name)
    monkeypatch.setattr(batch, "NAME_CHARS_MAX", 3)
    (tmp_path / "name.txt").write_text("x")
    _, (refusal,) = await reading.documents(FileSource(tmp_path / "name.txt", "name.txt"), 0)
    assert "at most 3 characters" in refusal.reason
