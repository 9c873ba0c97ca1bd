"""The word index of one collection's passages, with BM25 ranking.

Tantivy stores the postings and computes the scores (k1 1.2, b 0.75), in memory. It gets only terms,
which `terms.py` makes; callers store texts and apply filters and tenants. One thread at a time
makes changes; every search that begins after a change sees it. Any thread may search. Deleted
passages are never found, but count in term statistics until `compact`, as in every inverted index.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import tantivy

from workers.vector.fulltext.terms import query_terms, terms_of

TERMS_MAX = 64  # terms of a search; the rarest are taken
_HEAP_BYTES = 15_000_000  # of a writer, which is open only during a change
_LISTED_MAX = 1_024  # allowed rows up to which a filter becomes part of the query
_DIGITS = 4  # of a score: its last bits depend on Tantivy's segments, and ties go by id
_GROWN = 8


@dataclass(frozen=True, slots=True)
class AllowedPassages:
    """The passages that may be found: a test, and a list if they are few."""

    holds: Callable[[bytes], bool]
    listed: Sequence[bytes] | None = None


@dataclass(slots=True)
class _State:
    """One Tantivy index. Numbers of passages ascend and are never reused."""

    index: Any = None  # None until the first change
    ids: list[bytes] = field(default_factory=list)  # by number
    number_of: dict[bytes, int] = field(default_factory=dict)


@cache
def _schema() -> Any:
    builder = tantivy.SchemaBuilder()
    builder.add_integer_field("number", stored=False, indexed=True, fast=True)
    builder.add_text_field(
        "terms", stored=False, tokenizer_name="whitespace", index_option="freq"
    )  # fmt: skip
    return builder.build()


class WordIndex:
    """A word index: `change` and `search` it, and `compact` it from time to time."""

    def __init__(self) -> None:
        self._state = _State()

    def __len__(self) -> int:
        return len(self._state.number_of)

    @property
    def dead_share(self) -> float:
        """Return the share of passages that are deleted but still counted."""
        state = self._state
        return 1 - len(state.number_of) / len(state.ids) if state.ids else 0.0

    def change(self, deleted_ids: Iterable[bytes], texts: Mapping[bytes, str]) -> None:
        """Delete passages and add others, which replace those with the same ids. Blocks."""
        _write(self._state, deleted_ids, texts)

    def compact(self, texts: Mapping[bytes, str]) -> None:
        """Rebuild the index of these passages. Blocks; searches use the old index meanwhile."""
        state = _State()
        _write(state, (), texts)
        self._state = state

    def search(
        self, text: str, depth: int, allowed: AllowedPassages | None = None
    ) -> list[tuple[bytes, float]]:
        """Return the best passages for a text and their scores; equal scores in order of ids."""
        state = self._state
        if not state.number_of:
            return []
        searcher = state.index.searcher()
        query = _query(searcher, text)
        if query is None:
            return []
        if allowed is not None and allowed.listed is not None:
            query = _within(query, state, allowed.listed)
        limit = depth + 16
        while True:
            hits = searcher.search(query, limit, count=False).hits
            numbers = searcher.fast_field_values("number", [place for _, place in hits])
            matches = [
                (state.ids[number], round(score, _DIGITS))
                for (score, _), number in zip(hits, numbers, strict=True)
                if allowed is None or allowed.holds(state.ids[number])
            ]
            # The next hit may have the same score as the last wanted one, and a smaller id.
            if len(hits) < limit or (
                len(matches) > depth and matches[depth - 1][1] > round(hits[-1][0], _DIGITS)
            ):
                return sorted(matches, key=lambda match: (-match[1], match[0]))[:depth]
            limit *= _GROWN


def _query(searcher: Any, text: str) -> Any:
    terms = query_terms(text)
    if len(terms) > TERMS_MAX:
        terms.sort(key=lambda term: (searcher.doc_freq("terms", term), term))
    parts = [
        tantivy.Query.term_query(_schema(), "terms", term, index_option="freq")
        for term in terms[:TERMS_MAX]
    ]
    if not parts:
        return None
    return tantivy.Query.boolean_query([(tantivy.Occur.Should, part) for part in parts])


def _within(query: Any, state: _State, listed: Sequence[bytes]) -> Any:
    numbers = [state.number_of[row_id] for row_id in listed if row_id in state.number_of]
    inside = tantivy.Query.term_set_query(_schema(), "number", numbers)
    must = [tantivy.Query.const_score_query(inside, 0.0), query]
    return tantivy.Query.boolean_query([(tantivy.Occur.Must, clause) for clause in must])


def listed_or_none(count: int, ids: Callable[[], Sequence[bytes]]) -> Sequence[bytes] | None:
    """Return the ids that a filter allows if they are few, else None."""
    return ids() if count <= _LISTED_MAX else None


def _write(state: _State, deleted_ids: Iterable[bytes], texts: Mapping[bytes, str]) -> None:
    dead = [
        state.number_of.pop(row_id)
        for row_id in {*deleted_ids, *texts}
        if row_id in state.number_of
    ]
    if not dead and not texts:
        return
    if state.index is None:
        state.index = tantivy.Index(_schema())
    writer = state.index.writer(heap_size=_HEAP_BYTES, num_threads=1)
    for number in dead:
        writer.delete_documents_by_term("number", number)
    for row_id, text in texts.items():
        number = len(state.ids)
        state.ids.append(row_id)
        state.number_of[row_id] = number
        writer.add_document(tantivy.Document(number=number, terms=" ".join(terms_of(text))))
    writer.commit()
    writer.wait_merging_threads()
    state.index.reload()
