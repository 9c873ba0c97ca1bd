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


def made(of: Document, cutting: Cutting = CUTTING) -> Any:
    spans = [Span(0, 7), Span(8, 13)]
    vectors = np.eye(2, dtype=np.float32)
    return passages_of(
        of, cutting, spans, vectors, lambda text: [len(text), -1], documents_offset=3, now_ms=9
    )


def test_a_record_holds_all_passages_with_vectors_and_tokens() -> None:
    found = made(document(tenant="t", metadata='{"a": 1}'))
    assert [chunk.text for chunk in found.chunks] == ["Pier 7.", "Noon."]
    assert [chunk.start for chunk in found.chunks] == [0, 8]
    assert np.frombuffer(found.chunks[1].vector, "<f4").tolist() == [0, 1]
    assert np.frombuffer(found.chunks[0].tokens, "<i4").tolist() == [7, -1]
    assert (found.tenant, found.metadata, found.documents_offset) == ("t", '{"a": 1}', 3)
    assert (found.document_ms, found.at_ms, found.embedder) == (5, 9, "hash@1")


def test_the_same_content_embeds_nothing_and_other_facts_keep_the_vectors() -> None:
    """The same content again embeds nothing."""
    first = document(metadata='{"a": 1}')
    held = passages_ref(made(first), offset=7)
    assert held.offset == 7
    cases = [
        (first, held, DocumentAction.NOTHING),
        (first, None, DocumentAction.EMBED),
        (document(metadata='{"a": 2}'), held, DocumentAction.KEEP),
        (document(metadata='{"a": 1}', tenant="t"), held, DocumentAction.KEEP),
        (document("Pier 8. Noon.", metadata='{"a": 1}'), held, DocumentAction.EMBED),
        (None, held, DocumentAction.DROP),
        (None, None, DocumentAction.NOTHING),
        (document(deleted=True), held, DocumentAction.DROP),
        (document("", vector=b"1234"), held, DocumentAction.DROP),
        (document("text", vector=b"1234"), None, DocumentAction.NOTHING),
        (document(""), None, DocumentAction.NOTHING),
    ]
    for of, known, wanted in cases:
        assert choose_action(of, CUTTING, known) is wanted, (of, known)


def test_whatever_passages_follow_from_is_in_their_hash() -> None:
    others = [
        dataclasses.replace(CUTTING, **change)
        for change in (
            {"chunk_tokens": 99},
            {"chunk_overlap": 19},
            {"embedder": "hash@2"},
            {"tokenizer": "tiny@1"},
        )
    ]
    hashes = {content_hash("a", each) for each in (CUTTING, *others)} | {content_hash("b", CUTTING)}
    assert len(hashes) == 6


def test_what_cannot_be_cut_is_refused_with_its_reason() -> None:
    cases: list[tuple[Document, type[RecordError], str]] = [
        (document(" \n"), RecordError, "document d: expected a text with words"),
        (document("a" * (DOCUMENT_CHARS_MAX + 1)), RecordTooLarge, "divide it into several"),
        (document(metadata="[]"), RecordError, "metadata: expected a JSON object, found \\[\\]"),
        (document(metadata="{"), RecordError, "metadata: expected a JSON object"),
        (document(metadata='{"a": {"b": 1}}'), RecordError, "found an object"),
        (document(metadata='{"a": 9007199254740994}'), RecordError, "store it as text"),
        (document(metadata="[" * 5_000), RecordError, "metadata: expected a JSON object"),
    ]
    for wrong, error, said in cases:
        with pytest.raises(error, match=said):
            check_text(wrong)
    check_text(document(metadata='{"a": 1}'))
    check_spans(document(), [Span(0, 1)] * CHUNKS_MAX)
    with pytest.raises(RecordTooLarge, match=f"at most {CHUNKS_MAX} passages, found"):
        check_spans(document(), [Span(0, 1)] * (CHUNKS_MAX + 1))
