"""What is kept beside a passage's row: as it was, in the present form and in the former one."""

import struct

import pytest

from tests.workers.search.words.shelves import record
from workers.search.words.changes import texts_of
from workers.search.words.texts import PassageText, unpack


def packed_formerly(text: PassageText) -> bytes:
    parts = [each.encode() for each in (text.document_id, text.title, text.source, text.text)]
    head = struct.pack("<qiiHHHI", text.offset, text.number, text.start, *map(len, parts))
    return b"".join([head, *parts, text.tokens])


def test_passages_are_kept_as_they_are() -> None:
    metadata = '{"title": "Zeiten", "path": "a/b.md"}'
    found = texts_of(record("d", "zwölf", "", offset=7, metadata=metadata, content_hash="h1"))
    assert [unpack(each.pack()) for each in found] == found
    passage = found[0].as_record()
    assert (passage.content, passage.title, passage.source) == ("h1", "Zeiten", "a/b.md")
    with pytest.raises(ValueError, match="expected a passage"):
        unpack(b"\xff" * 12)


def test_a_title_that_is_a_list_reads_as_one() -> None:
    found = texts_of(record("d", "zwölf", metadata='{"title": ["A", "B"], "source": []}'))[0]
    assert (found.title, found.source) == ("A, B", "")


def test_passages_of_older_snapshots_are_still_read() -> None:
    """In place of the content they tell the offset, which changes with it."""
    text = texts_of(record("d", "zwölf", offset=7))[0]
    found = unpack(packed_formerly(text))
    assert found.content == "offset 7"
    assert found.text == "zwölf" and found.tokens == text.tokens and found.number == 0
