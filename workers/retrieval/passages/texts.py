"""The payload of a passage's row: its text, and the data that prompts and citations need.

The index stores the payload as opaque bytes, which move, are deleted and are saved with the row.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from schemas.records import Passage
from workers.vector.index.index import Index

NAME_CHARS_MAX = 1_024  # longer titles and sources are cut off
_FORM = (-1).to_bytes(8, "little", signed=True)  # in place of the former format's offset
_HEAD = struct.Struct("<8sqiiHHHHI")  # form; numbers; lengths of names, content and text in bytes
_FORMER = struct.Struct("<qiiHHHI")  # the former format, without form and content, in snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class PassageText:
    """A passage without its vector and metadata."""

    document_id: str
    number: int
    start: int
    text: str
    tokens: bytes
    title: str
    source: str
    offset: int  # of its document on `documents`; newer passages have larger ones
    content: str  # `DocumentPassages.content_hash` of its document

    @property
    def row_id(self) -> bytes:
        """Return the passage's id in the index: bytes, which no document with a vector has."""
        return row_id(self.document_id, self.number)

    def pack(self) -> bytes:
        """Encode the passage as the payload of its row."""
        name_fields = (self.document_id, self.title, self.source, self.content)
        names = [name[:NAME_CHARS_MAX] for name in name_fields]
        parts = [part.encode(errors="replace") for part in (*names, self.text)]
        head = _HEAD.pack(_FORM, self.offset, self.number, self.start, *map(len, parts))
        return b"".join([head, *parts, self.tokens])

    def as_record(self) -> Passage:
        """Make the record of the passage for search hits."""
        return Passage(
            passage_id=self.row_id.decode(),
            document_id=self.document_id,
            text=self.text,
            tokens=self.tokens,
            start=self.start,
            title=self.title,
            source=self.source,
            content=self.content,
        )


def unpack(payload: bytes) -> PassageText:
    """Decode a payload of `PassageText.pack`; raises ValueError for other bytes."""
    is_former = not payload.startswith(_FORM)
    try:
        head = _FORMER.unpack_from(payload) if is_former else _HEAD.unpack_from(payload)[1:]
    except struct.error as error:
        raise ValueError(f"expected a passage, found {payload[:40]!r}") from error
    offset, number, start, *lengths = head
    at, parts = (_FORMER if is_former else _HEAD).size, []
    for length in lengths:
        parts.append(payload[at : at + length].decode())
        at += length
    if at > len(payload) or (len(payload) - at) % 4:
        raise ValueError(f"expected a passage with whole tokens, found {len(payload)} bytes")
    if is_former:  # without a content hash; the offset differs for each record of the document
        parts.insert(3, f"offset {offset}")
    document_id, title, source, content, text = parts
    return PassageText(
        document_id=document_id, number=number, start=start, text=text, tokens=payload[at:],
        title=title, source=source, offset=offset, content=content,
    )  # fmt: skip


def payload_of_text(document_id: str, text: str) -> bytes:
    """Encode the text of a document that came with its vector; empty if there is no text.

    Such a text is neither cut into passages nor found by words.
    """
    if not text:
        return b""
    passage = PassageText(
        document_id=document_id, number=0, start=0, text=text, tokens=b"", title="", source="",
        offset=0, content="",
    )  # fmt: skip
    return passage.pack()


def row_id(document_id: str, number: int) -> bytes:
    """Return the id of a passage's row."""
    return f"{document_id}#{number}".encode()


def passages_of(index: Index) -> Iterator[PassageText]:
    """Yield all passages of an index, which must not change meanwhile; texts that came with a
    vector are no passages.
    """
    rows = index.rows
    for external, row in rows.row_of.items():
        if isinstance(external, bytes) and (payload := rows.payloads[row]):
            yield unpack(payload)
