"""What is kept beside the row of a passage: its text, and what a prompt and a citation need.

The index keeps it as bytes that it does not look into, so it moves, is deleted and is saved with
its row.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from schemas.records import Passage
from workers.search.index.index import Index

NAME_CHARS_MAX = 1_024  # of a title or source, which are cut off there
_FORM = (-1).to_bytes(8, "little", signed=True)  # where the former form has an offset
_HEAD = struct.Struct("<8sqiiHHHHI")  # form; numbers; bytes of names, content and text
_FORMER = struct.Struct("<qiiHHHI")  # the same, less form and content; snapshots may hold it


@dataclass(frozen=True, slots=True, kw_only=True)
class PassageText:
    """A passage, less its vector and metadata."""

    document_id: str
    number: int
    start: int
    text: str
    tokens: bytes
    title: str
    source: str
    offset: int  # of its document on `documents`, which tells old passages from new ones
    content: str  # `DocumentPassages.content_hash` of its document

    @property
    def row_id(self) -> bytes:
        """Its id in the index: bytes, so that no document that came with a vector has it."""
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
    """Inverse of `packed`; raises ValueError for what nobody packed."""
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
    if is_former:  # another record of the document has another offset
        parts.insert(3, f"offset {offset}")
    document_id, title, source, content, text = parts
    return PassageText(
        document_id=document_id, number=number, start=start, text=text, tokens=payload[at:],
        title=title, source=source, offset=offset, content=content,
    )  # fmt: skip


def payload_of_text(document_id: str, text: str) -> bytes:
    """What is kept of a text that came with its vector, and is neither cut nor found by words.

    Empty where there is no text.
    """
    if not text:
        return b""
    passage = PassageText(
        document_id=document_id, number=0, start=0, text=text, tokens=b"", title="", source="",
        offset=0, content="",
    )  # fmt: skip
    return passage.pack()


def row_id(document_id: str, number: int) -> bytes:
    """The id of a passage, as bytes."""
    return f"{document_id}#{number}".encode()


def passages_of(index: Index) -> Iterator[PassageText]:
    """All that an index holds; nobody may change it meanwhile. Texts that came with a vector are
    none.
    """
    rows = index.rows
    for external, row in rows.row_of.items():
        if isinstance(external, bytes) and (payload := rows.payloads[row]):
            yield unpack(payload)
