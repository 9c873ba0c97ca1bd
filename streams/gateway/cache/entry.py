"""An answer that is kept, as a document of the cache's collection: under its question's vector,
with all else in its text. Pure.

Ids are slots, so that a tenant's entries are bounded without anybody who counts them: a newer entry
takes the place of an older one in its slot, and the same question always has the same slot.
"""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from schemas.records import Citation, Document, OutcomeKind, Quoted
from schemas.retrieval import pack_vector
from streams.gateway.cache.wish import CacheWish
from streams.gateway.stream.answers import usage
from streams.gateway.stream.citations import annotations, retrieval
from streams.gateway.stream.stream import Stream

ENTRY_BYTES_MAX = 64 << 10  # of an entry's text
KEY_FIELD, UNTIL_FIELD = "key", "until_ms"  # of its metadata
_ID = re.compile(r"answer-([0-9a-z]+)-\d{1,9}")
_NOBODY = "all"  # where no keys are set


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What was answered, to what, and from which documents."""

    key: str
    question: str
    text: str
    finish_reason: str
    stop_reason: str
    usage: Mapping[str, Any]
    retrieval: Mapping[str, Any] | None  # as `trivium.retrieval` has it
    annotations: Sequence[Mapping[str, Any]]
    quoted: Sequence[Sequence[str]]  # document and content
    collection: str  # theirs
    created_ms: int
    until_ms: int

    @property
    def documents(self) -> list[Quoted]:
        """What it cites, to be asked whether it still says that."""
        return [Quoted(document_id=name, content=content) for name, content in self.quoted]


def entry_of(
    wish: CacheWish, stream: Stream, text: str, *, looked_up: bool, now_ms: int
) -> Entry | None:
    """An answer that has just ended, as it is kept; None where it is none for others.

    That is one that was cut, or differs from what stood before it, or whose documents were not all
    searched, cannot be asked about, or are none at all though it was looked up.
    """
    end, told = stream.end, stream.retrieved
    if end is None or end.kind is not OutcomeKind.COMPLETED or stream.differs_at is not None:
        return None
    if end.finish_reason not in ("", "stop"):
        return None
    cited: list[Citation] = [each for found in told.values() for each in found.citations]
    if looked_up and not cited:
        return None
    if any(found.error or found.missing_shards or found.degraded for found in told.values()):
        return None
    if not all(each.content for each in cited):
        return None
    quoted = {each.document_id: each.content for each in cited}
    if any(quoted[each.document_id] != each.content for each in cited):
        return None  # a document changed while it was answered
    return Entry(
        key=wish.key,
        question=wish.question,
        text=text,
        finish_reason=end.finish_reason or "stop",
        stop_reason=end.stop_reason,
        usage=usage([stream], 1),
        retrieval=retrieval(told) if told else None,
        annotations=annotations(told, len(text)),
        quoted=[*quoted.items()],
        collection=next((found.collection for found in told.values()), ""),
        created_ms=now_ms,
        until_ms=now_ms + 1000 * wish.ttl_s,
    )


def document_of(
    entry: Entry,
    vector: Any,
    *,
    collection: str,
    tenant: str,
    number: int,
    entries_max: int,
) -> Document | None:
    """As it stands on the log; None where it is too large."""
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


def read(text: str) -> Entry | None:
    """Inverse; None for what nobody here has written."""
    try:
        return Entry(**json.loads(text))
    except (ValueError, TypeError):
        return None


def is_of(entry_id: str, tenant: str) -> bool:
    """Whether this can be the id of an entry of this tenant."""
    found = _ID.fullmatch(entry_id)
    return found is not None and found[1] == (tenant or _NOBODY)
