"""What becomes of a document."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from schemas.errors import RecordError, RecordTooLarge
from schemas.records import Document
from schemas.rules.sizes import CHUNKS_MAX, DOCUMENT_CHARS_MAX
from workers.embed.chunking import Span
from workers.embed.content import (
    Cutting,
    DocumentAction,
    check_spans,
    check_text,
    choose_action,
    content_hash,
    passages_of,
    passages_ref,
)

CUTTING = Cutting(100, 20, "hash@1", "")


def document(text: str = "Pier 7. Noon.", **fields: Any) -> Document:
    return Document(**{"document_id": "d", "collection": "c", "at_ms": 5, "text": text, **fields})


def passages_record(of: Document, cutting: Cutting = CUTTING) -> Any:
    spans = [Span(0, 7), Span(8, 13)]
    vectors = np.eye(2, dtype=np.float32)
    return passages_of(
        of, cutting, spans, vectors, lambda text: [len(text), -1], documents_offset=3, now_ms=9
    )


def test_passages_record_contains_vectors_and_tokens() -> None:
    record = passages_record(document(tenant="t", metadata='{"a": 1}'))
    assert [chunk.text for chunk in record.chunks] == ["Pier 7.", "Noon."]
    assert [chunk.start for chunk in record.chunks] == [0, 8]
    assert np.frombuffer(record.chunks[1].vector, "<f4").tolist() == [0, 1]
    assert np.frombuffer(record.chunks[0].tokens, "<i4").tolist() == [7, -1]
    assert (record.tenant, record.metadata, record.documents_offset) == ("t", '{"a": 1}', 3)
    assert (record.document_ms, record.at_ms, record.embedder) == (5, 9, "hash@1")


def test_document_action_depends_on_changed_content() -> None:
    """Unchanged content is not embedded again; new metadata keeps the vectors."""
    first = document(metadata='{"a": 1}')
    stored_ref = passages_ref(passages_record(first), offset=7)
    assert stored_ref.offset == 7
    cases = [
        (first, stored_ref, DocumentAction.NOTHING),
        (first, None, DocumentAction.EMBED),
        (document(metadata='{"a": 2}'), stored_ref, DocumentAction.KEEP),
        (document(metadata='{"a": 1}', tenant="t"), stored_ref, DocumentAction.KEEP),
        (document("Pier 8. Noon.", metadata='{"a": 1}'), stored_ref, DocumentAction.EMBED),
        (None, stored_ref, DocumentAction.DROP),
        (None, None, DocumentAction.NOTHING),
        (document(deleted=True), stored_ref, DocumentAction.DROP),
        (document("", vector=b"1234"), stored_ref, DocumentAction.DROP),
        (document("text", vector=b"1234"), None, DocumentAction.NOTHING),
        (document(""), None, DocumentAction.NOTHING),
    ]
    for of, ref, expected in cases:
        assert choose_action(of, CUTTING, ref) is expected, (of, ref)


def test_content_hash_covers_text_and_cutting() -> None:
    changed_cuttings = [
        dataclasses.replace(CUTTING, **change)
        for change in (
            {"chunk_tokens": 99},
            {"chunk_overlap": 19},
            {"embedder": "hash@2"},
            {"tokenizer": "tiny@1"},
        )
    ]
    hashes = {content_hash("a", cutting) for cutting in (CUTTING, *changed_cuttings)} | {
        content_hash("b", CUTTING)
    }
    assert len(hashes) == 6


def test_document_check_rejects_unusable_text_with_reason() -> None:
    cases: list[tuple[Document, type[RecordError], str]] = [
        (document(" \n"), RecordError, "document d: expected a text with words"),
        (document("a" * (DOCUMENT_CHARS_MAX + 1)), RecordTooLarge, "divide it into several"),
        (document(metadata="[]"), RecordError, "metadata: expected a JSON object, found \\[\\]"),
        (document(metadata="{"), RecordError, "metadata: expected a JSON object"),
        (document(metadata='{"a": {"b": 1}}'), RecordError, "found an object"),
        (document(metadata='{"a": 9007199254740994}'), RecordError, "store it as text"),
        (document(metadata="[" * 5_000), RecordError, "metadata: expected a JSON object"),
    ]
    for wrong, error, message in cases:
        with pytest.raises(error, match=message):
            check_text(wrong)
    check_text(document(metadata='{"a": 1}'))
    check_spans(document(), [Span(0, 1)] * CHUNKS_MAX)
    with pytest.raises(RecordTooLarge, match=f"at most {CHUNKS_MAX} passages, found"):
        check_spans(document(), [Span(0, 1)] * (CHUNKS_MAX + 1))
