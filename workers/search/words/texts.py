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
_HEAD = struct.Struct("<qiiHHHI")  # offset, number, start; bytes of document, title, source, text


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

    @property
    def row_id(self) -> bytes:
        """Its id in the index: bytes, so that no document that came with a vector has it."""
        return row_id(self.document_id, self.number)

    def packed(self) -> bytes:
        """As bytes."""
        names = [each[:NAME_CHARS_MAX] for each in (self.document_id, self.title, self.source)]
        parts = [each.encode(errors="replace") for each in (*names, self.text)]
        head = _HEAD.pack(self.offset, self.number, self.start, *map(len, parts))
        return b"".join([head, *parts, self.tokens])

    def as_record(self) -> Passage:
        """As it is found."""
        return Passage(
            passage_id=self.row_id.decode(),
            document_id=self.document_id,
            text=self.text,
            tokens=self.tokens,
            start=self.start,
            title=self.title,
            source=self.source,
        )


def unpacked(payload: bytes) -> PassageText:
    """Inverse of `packed`; raises ValueError for what nobody packed."""
    try:
        offset, number, start, *lengths = _HEAD.unpack_from(payload)
    except struct.error as error:
        raise ValueError(f"expected a passage, found {payload[:40]!r}") from error
    at, parts = _HEAD.size, []
    for length in lengths:
        parts.append(payload[at : at + length].decode())
        at += length
    if at > len(payload) or (len(payload) - at) % 4:
        raise ValueError(f"expected a passage with whole tokens, found {len(payload)} bytes")
    document_id, title, source, text = parts
    return PassageText(
        document_id=document_id, number=number, start=start, text=text, tokens=payload[at:],
        title=title, source=source, offset=offset,
    )  # fmt: skip


def row_id(document_id: str, number: int) -> bytes:
    """The id of a passage, as bytes."""
    return f"{document_id}#{number}".encode()


def passages_of(index: Index) -> Iterator[PassageText]:
    """All that an index holds; nobody may change it meanwhile."""
    rows = index.rows
    for row in list(rows.row_of.values()):
        if payload := rows.payloads[row]:
            yield unpacked(payload)
