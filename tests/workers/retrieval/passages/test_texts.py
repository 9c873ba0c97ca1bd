"""What is kept beside a passage's row: as it was, in the present form and in the former one."""

import struct

import pytest

from tests.workers.retrieval.passages.passage_fixtures import record
from workers.retrieval.passages.changes import texts_of
from workers.retrieval.passages.texts import PassageText, unpack


def packed_formerly(text: PassageText) -> bytes:
    parts = [field.encode() for field in (text.document_id, text.title, text.source, text.text)]
    head = struct.pack("<qiiHHHI", text.offset, text.number, text.start, *map(len, parts))
    return b"".join([head, *parts, text.tokens])


def test_passage_text_round_trips() -> None:
    metadata = '{"title": "Zeiten", "path": "a/b.md"}'
    texts = texts_of(record("d", "zwölf", "", offset=7, metadata=metadata, content_hash="h1"))
    assert [unpack(passage_text.pack()) for passage_text in texts] == texts
    passage = texts[0].as_record()
    assert (passage.content, passage.title, passage.source) == ("h1", "Zeiten", "a/b.md")
    with pytest.raises(ValueError, match="expected a passage"):
        unpack(b"\xff" * 12)


def test_list_title_becomes_one_string() -> None:
    passage = texts_of(record("d", "zwölf", metadata='{"title": ["A", "B"], "source": []}'))[0]
    assert (passage.title, passage.source) == ("A, B", "")


def test_passage_of_older_snapshot_is_read() -> None:
    """It holds the offset in place of the content, since both change together."""
    text = texts_of(record("d", "zwölf", offset=7))[0]
    passage = unpack(packed_formerly(text))
    assert passage.content == "offset 7"
    assert passage.text == "zwölf" and passage.tokens == text.tokens and passage.number == 0
