"""A collection's documents that came as text: their passages, and which passages are accepted.

Documents and passages come on two topics, and either may be ahead. `documents` is the truth: a
document is live as text while its last record there has text. Passages carry their document's
offset, which shows which ones are newer. Passages of a document that is not live as text are
refused, unless they are ahead of the reader of `documents`. A later deletion of the document, or
its later record with a vector, deletes them. Pure except for the word index.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from workers.retrieval.passages.texts import row_id
from workers.vector.fulltext.index import WordIndex

_FLOORS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class PassageSet:
    """The passages of a document."""

    offset: int  # of the document on `documents`
    count: int


@dataclass(slots=True)
class PassageStore:
    """The passages of one collection, and its documents that are live as text."""

    words: WordIndex = field(default_factory=WordIndex)
    embedder: str = ""  # of the stored passages
    documents: int = 0  # with stored passages
    passages: int = 0
    _live: dict[str, PassageSet | None] = field(default_factory=dict)
    _floors: dict[str, int] = field(default_factory=dict)  # last offset as no text, by document
    _deleted_ids: set[bytes] = field(default_factory=set)
    _added_texts: dict[bytes, str] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Return whether no document is live as text."""
        return not self._live

    def waiting(self) -> list[str]:
        """Return the documents that are live as text and have no passages."""
        live = list(self._live.items())
        return [name for name, passages in live if passages is None or not passages.count]

    def passages_of(self, document_id: str) -> PassageSet | None:
        """Return the offset and count of a document's passages, None if none are stored."""
        return self._live.get(document_id)

    def rows(self, document_id: str) -> list[bytes]:
        """Return the row ids of a document's passages."""
        passages = self._live.get(document_id)
        return [row_id(document_id, number) for number in range(passages.count if passages else 0)]

    def add_document(self, document_id: str) -> None:
        """Note that a document is live as text by its last record."""
        self._live.setdefault(document_id, None)

    def is_newer(self, document_id: str, offset: int) -> bool:
        """Return whether the stored passages are newer than a record at this offset."""
        passages = self._live.get(document_id)
        return passages is not None and passages.offset > offset

    def end_document(self, document_id: str, offset: int) -> None:
        """Note that a document is no text any more, and forget its passages."""
        self._drop(document_id)
        if document_id not in self._live and document_id not in self._floors:
            return  # no passages of it can be in flight
        self._live.pop(document_id, None)
        self._floors.pop(document_id, None)
        self._floors[document_id] = offset
        if len(self._floors) > _FLOORS_MAX:
            del self._floors[next(iter(self._floors))]

    def accepts(self, document_id: str, offset: int, read_to: int) -> bool:
        """Return whether to accept passages of a document's record at this offset.

        `read_to` is the next offset of `documents`."""
        if offset <= self._floors.get(document_id, -1) or self.is_newer(document_id, offset):
            return False
        return offset >= read_to or document_id in self._live

    def put(self, document_id: str, offset: int, embedder: str, texts: Mapping[bytes, str]) -> None:
        """Replace the passages of a document by these."""
        self._drop(document_id)
        self._live[document_id] = PassageSet(offset, len(texts))
        self._count(1, len(texts))
        self._added_texts |= texts
        self.embedder = embedder if self.passages else ""

    def drop(self, document_id: str) -> None:
        """Forget the passages of a document, which stays live as text."""
        self._drop(document_id)
        if document_id in self._live:
            self._live[document_id] = None

    def _drop(self, document_id: str) -> None:
        rows = self.rows(document_id)
        for passage_id in rows:
            self._added_texts.pop(passage_id, None)
        self._deleted_ids.update(rows)
        self._count(-1, -len(rows))
        self.embedder = self.embedder if self.passages else ""

    def restore(self, document_id: str, offset: int, count: int) -> None:
        """Restore a document's passages from a snapshot, without their words."""
        self._live[document_id] = PassageSet(offset, count)
        self._count(1, count)

    def _count(self, documents: int, passages: int) -> None:
        self.documents += documents if passages else 0
        self.passages += passages

    def documents_with_passages(self) -> Iterator[str]:
        """Return an iterator over the documents with stored passages."""
        return iter([name for name, passages in self._live.items() if passages is not None])

    def flush(self) -> None:
        """Bring the word index up to date with the passages. Blocks."""
        deleted_ids, added_texts = self._deleted_ids, self._added_texts
        self._deleted_ids, self._added_texts = set(), {}
        self.words.change(deleted_ids, added_texts)
