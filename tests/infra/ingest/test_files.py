"""What files of each kind become (issue 12, 2)."""

import json
from pathlib import Path
from typing import Any

import pytest
from pypdf import PdfReader

from infra.ingest import batch, files
from infra.ingest.batch import Reading, Target
from infra.ingest.files import Source, read, source_of, sources
from schemas.rules.sizes import DOCUMENT_CHARS_MAX
from streams.parsing.parsed import Unreadable
from tests.streams.parsing.pdfs import pdf_bytes


def test_pdf_gives_its_pages_and_its_title(tmp_path: Path) -> None:
    file = tmp_path / "a.pdf"
    file.write_bytes(pdf_bytes("Pier 7.", "Pier 9."))
    (found,) = read(file)
    assert (found.title, found.text) == ("A paper", "Pier 7.\n\nPier 9.")
    assert len(PdfReader(file).pages) == 2


WRONG: list[tuple[str, bytes, str]] = [
    ("a.bin", b"x", "unknown kind of file; expected one that ends in .txt, "),
    ("a.txt", b"\xff\x00\x80", "expected text in UTF-8, found other bytes at 0"),
    ("a.md", b"a\0b", "found zero bytes"),
    ("a.pdf", b"no", "expected a PDF: "),
    ("b.pdf", pdf_bytes(""), "found none on 1 pages: a scan"),
    ("c.pdf", pdf_bytes("x", password="secret"), "without a password"),
]


def test_what_cannot_be_read_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 12: unreadable, empty, oversized and unknown files."""
    for name, data, said in WRONG:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(Unreadable, match=said):
            read(tmp_path / name)
    with pytest.raises(Unreadable, match="no such file"):
        read(tmp_path / "none.txt")
    monkeypatch.setattr(files, "FILE_BYTES_MAX", 3)
    (tmp_path / "long.txt").write_text("four")
    with pytest.raises(Unreadable, match="at most 3 bytes, found 4"):
        read(tmp_path / "long.txt")


def test_marks_of_other_encodings_are_understood(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        file.write_bytes("Grüße\r\nan alle".encode(encoding))
        assert read(file)[0].text == "Grüße\nan alle"


def test_each_line_of_json_is_a_document_and_wrong_ones_are_named(tmp_path: Path) -> None:
    lines: list[Any] = [
        {"id": "a", "text": "A text.", "title": "A", "metadata": {"year": 2020}, "tenant": "t"},
        {"id": 7, "text": "Seven."},
        {"text": "no id"},
        {"id": "x"},
        [],
        {"id": "v", "vector": [1]},
        {"id": "m", "text": "m", "metadata": [1]},
        {"id": "a", "text": "again"},
    ]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n{")
    reading = Reading(Target(collection="c", tenant="all", metadata={"site": 1}))
    found, refused = reading.documents(Source(file, "a.jsonl"), 5)
    assert [(each.document_id, each.text, each.tenant) for each in found] == [
        ("a", "A text.", "t"),
        ("7", "Seven.", "all"),
    ]
    facts = json.loads(found[0].metadata)
    assert (facts["title"], facts["year"], facts["site"]) == ("A", 2020, 1)
    assert facts["source"].endswith("a.jsonl") and facts["mtime"] > 0
    assert [each.path.rpartition(", ")[2] for each in refused] == [
        *(f"line {number}" for number in (3, 4, 5, 6, 7, 8, 10)),
    ]
    for each, said in zip(
        refused,
        ("an id", "a text", "an object|object with", "documents load", "strings", "taken", "JSON"),
        strict=True,
    ):
        assert any(part in each.reason for part in said.split("|")), each


def test_ids_are_paths_below_what_was_named_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    for name in ("b.md", "a/c.txt", ".git/x.txt", "a/.hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [each.name for each in sources([tmp_path])] == ["b.md", "a/c.txt"]
    assert [each.name for each in sources([tmp_path / "a" / "c.txt"])] == ["c.txt"]
    assert source_of(tmp_path / "a/c.txt", [tmp_path]) == Source(tmp_path / "a/c.txt", "a/c.txt")
    assert source_of(tmp_path / ".git/x.txt", [tmp_path]) is None
    assert source_of(tmp_path / "b.md", [tmp_path / "a"]) is None
    assert source_of(tmp_path / "b.md", [tmp_path / "b.md"]) == Source(tmp_path / "b.md", "b.md")


def test_an_id_is_of_one_file_and_goes_with_it(tmp_path: Path) -> None:
    reading = Reading(Target(collection="c"))
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(f"From {folder}.")
    one, two = (Source(tmp_path / folder / "a.txt", "a.txt") for folder in ("one", "two"))
    assert len(reading.documents(one, 0)[0]) == 1
    found, refused = reading.documents(two, 0)
    assert not found and "'a.txt' is taken" in refused[0].reason
    assert len(reading.documents(one, 0)[0]) == 1, "its own id is not taken"
    assert reading.gone(one.path, ["a.txt"]) == []
    assert reading.gone(tmp_path / "one") == ["a.txt"]
    assert len(reading.documents(two, 0)[0]) == 1


def test_empty_and_long_texts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(Target(collection="c"))
    for name, text, said in (
        ("empty.txt", " \n", "empty: expected a text with words"),
        ("long.txt", "a" * (DOCUMENT_CHARS_MAX + 1), "too large: expected at most"),
    ):
        (tmp_path / name).write_text(text)
        found, refused = reading.documents(Source(tmp_path / name, name), 0)
        assert not found and said in refused[0].reason and refused[0].path.endswith(name)
    monkeypatch.setattr(batch, "NAME_CHARS_MAX", 3)
    (tmp_path / "name.txt").write_text("x")
    (refusal,) = reading.documents(Source(tmp_path / "name.txt", "name.txt"), 0)[1]
    assert "at most 3 characters" in refusal.reason
