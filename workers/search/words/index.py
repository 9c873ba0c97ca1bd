"""The words of one collection's passages: who has those that are searched for, by BM25.

Tantivy keeps the lists and computes the scores (k1 1.2, b 0.75), in memory. It gets terms that
`terms.py` has cut, and nothing else: texts, filters and tenants are the caller's. Changes come from
one thread at a time and are found by every search that begins after them; searches may come from
any thread. Passages that were deleted count in the statistics of terms until `compact`, as in every
index of this kind, and are never found.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import tantivy

from workers.search.words.terms import query_terms, terms_of

TERMS_MAX = 64  # of a search: the rarest
_HEAP_BYTES = 15_000_000  # of a writer, of which one is open only during a change
_LISTED_MAX = 1_024  # rows that a filter allows, which are looked for and not passed over
_DIGITS = 4  # of a score: the last bits depend on how the lists lie, and equal ones go by id
_GROWN = 8


@dataclass(frozen=True, slots=True)
class AllowedPassages:
    """Which passages may be found: by a test, and as a list where they are few."""

    holds: Callable[[bytes], bool]
    listed: Sequence[bytes] | None = None


@dataclass(slots=True)
class _State:
    """Numbers count up and are never used twice; a new state begins anew."""

    index: Any = None  # until there is something
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
    """`change`, `search`, and now and then `compact`."""

    def __init__(self) -> None:
        self._state = _State()

    def __len__(self) -> int:
        return len(self._state.number_of)

    @property
    def dead_share(self) -> float:
        """Share of passages that are deleted and still counted."""
        state = self._state
        return 1 - len(state.number_of) / len(state.ids) if state.ids else 0.0

    def change(self, deleted_ids: Iterable[bytes], texts: Mapping[bytes, str]) -> None:
        """Take passages away and add others, in place of those that have these ids. Blocks."""
        _write(self._state, deleted_ids, texts)

    def compact(self, texts: Mapping[bytes, str]) -> None:
        """Begin anew with these passages. Blocks; searches meanwhile find what there was."""
        state = _State()
        _write(state, (), texts)
        self._state = state

    def search(
        self, text: str, depth: int, allowed: AllowedPassages | None = None
    ) -> list[tuple[bytes, float]]:
        """The best passages for a text and their scores, equal scores in order of ids."""
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
            # What comes next may be as good as the last one that is wanted, with a smaller id.
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
    """The ids that a filter allows, where so few are quicker to look for."""
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
