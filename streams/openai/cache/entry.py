"""A cached answer as a document of the cache's collection. Pure.

The document has the vector of its question; its text has everything else. Ids are slots, so that a
tenant's entries are bounded without a counter: a new entry replaces the old one in its slot, and
the same question always has the same slot.
"""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from schemas.records import Citation, Document, OutcomeKind, Quoted
from schemas.retrieval import pack_vector
from streams.calls.stream.answers import usage
from streams.calls.stream.citations import annotations, retrieval
from streams.calls.stream.stream import Stream
from streams.openai.cache.query import CacheQuery

ENTRY_BYTES_MAX = 64 << 10  # of an entry's text
KEY_FIELD, UNTIL_FIELD = "key", "until_ms"  # of its metadata
_ID = re.compile(r"answer-([0-9a-z]+)-\d{1,9}")
_NOBODY = "all"  # the tenant without API keys


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """An answer, its question, and the documents that it cites."""

    key: str
    question: str
    text: str
    finish_reason: str
    stop_reason: str
    usage: Mapping[str, Any]
    retrieval: Mapping[str, Any] | None  # as `trivium.retrieval` has it
    annotations: Sequence[Mapping[str, Any]]
    quoted: Sequence[Sequence[str]]  # id and content hash of each document
    collection: str  # of the documents
    created_ms: int
    until_ms: int

    @property
    def documents(self) -> list[Quoted]:
        """Return the documents that it cites, for a check whether they are unchanged."""
        return [Quoted(document_id=name, content=content) for name, content in self.quoted]


def entry_of(
    query: CacheQuery, stream: Stream, text: str, *, has_retrieval: bool, now_ms: int
) -> CacheEntry | None:
    """Return the entry of an answer that has just ended, or None if it cannot serve other callers.

    That is an answer that was cut, or in which attempts differ, or without all shards searched, or
    whose documents cannot be checked, or with a search that found none.
    """
    end, notices = stream.end, stream.retrieved
    if end is None or end.kind is not OutcomeKind.COMPLETED or stream.differs_at is not None:
        return None
    if end.finish_reason not in ("", "stop"):
        return None
    cited: list[Citation] = [
        citation for notice in notices.values() for citation in notice.citations
    ]
    if has_retrieval and not cited:
        return None
    if any(notice.error or notice.missing_shards or notice.degraded for notice in notices.values()):
        return None
    if not all(citation.content for citation in cited):
        return None
    quoted = {citation.document_id: citation.content for citation in cited}
    if any(quoted[citation.document_id] != citation.content for citation in cited):
        return None  # a document changed while it was answered
    return CacheEntry(
        key=query.key,
        question=query.question,
        text=text,
        finish_reason=end.finish_reason or "stop",
        stop_reason=end.stop_reason,
        usage=usage([stream], 1),
        retrieval=retrieval(notices) if notices else None,
        annotations=annotations(notices, len(text)),
        quoted=[*quoted.items()],
        collection=next((notice.collection for notice in notices.values()), ""),
        created_ms=now_ms,
        until_ms=now_ms + 1000 * query.ttl_s,
    )


def document_of(
    entry: CacheEntry,
    vector: Any,
    *,
    collection: str,
    tenant: str,
    number: int,
    entries_max: int,
) -> Document | None:
    """Build the document of an entry; None if it is too large."""
    text = json.dumps(asdict(entry), ensure_ascii=False)
    if len(text.encode("utf-8", "replace")) > ENTRY_BYTES_MAX:
        return None
    slot = zlib.crc32(f"{entry.key}\0{entry.question}".encode("utf-8", "replace")) % entries_max
    return Document(
        document_id=f"answer-{tenant or _NOBODY}-{slot}",
        collection=collection,
        vector=pack_vector(vector),
        metadata=json.dumps({KEY_FIELD: number, UNTIL_FIELD: entry.until_ms}),
        at_ms=entry.created_ms,
        text=text,
        tenant=tenant,
    )


def parse_entry(text: str) -> CacheEntry | None:
    """Parse an entry's text; None for a text that no gateway has written."""
    try:
        return CacheEntry(**json.loads(text))
    except (ValueError, TypeError):
        return None


def belongs_to(entry_id: str, tenant: str) -> bool:
    """Return whether this can be the id of an entry of this tenant."""
    match = _ID.fullmatch(entry_id)
    return match is not None and match[1] == (tenant or _NOBODY)
