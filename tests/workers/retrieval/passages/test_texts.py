"""What is stored beside a passage's row comes back as it was."""

import pytest

from tests.workers.retrieval.passages.passage_fixtures import record
from workers.retrieval.passages.changes import texts_of
from workers.retrieval.passages.texts import unpack


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
