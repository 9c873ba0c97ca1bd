"""Searches by a text: nearest passages by vector, best passages by words, and their texts.

Both searches run at once, by vector in the engine and by words on threads of their own, so that
neither blocks the event loop. Hits below `min_score` are left out of both lists before they are
ranked. Texts are sent only of passages that may be among the k best of all shards.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from schemas.errors import InvalidRequest, QueueFull, TriviumError
from schemas.records import Passage, RetrievalRequest
from schemas.retrieval import MODES, WORDS, pack_vector, unpack_vector
from schemas.rules.ranks import candidates, depth_of
from schemas.rules.sizes import RETRIEVAL_BYTES_MAX
from workers.retrieval.passages.texts import unpack
from workers.vector.engine.engine import SearchEngine
from workers.vector.filters.filters import Filter, parse
from workers.vector.fulltext.index import AllowedPassages, WordIndex, listed_or_none
from workers.vector.index.index import Index
from workers.vector.index.query import ExternalId, Query, SearchAnswer
from workers.vector.index.rows import Rows
from workers.vector.limits import K_MAX

Array = np.ndarray[Any, Any]
Scores = Mapping[ExternalId, float]
_PASSAGE_BYTES_MAX = RETRIEVAL_BYTES_MAX * 3 // 4  # of all passages of an answer
_REST_BYTES = 64  # of a passage, besides text, tokens and names


class TextSearches:
    """Searches by texts; `find` may run many times at once, then `close`."""

    def __init__(self, engine: SearchEngine, waiting_max: int, threads: int) -> None:
        self._engine = engine
        self._waiting, self._waiting_max = 0, waiting_max
        self._threads = ThreadPoolExecutor(threads, "search-words")

    def close(self) -> None:
        """Stop the threads and cancel waiting searches."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def find(
        self, request: RetrievalRequest, index: Index, words: WordIndex, query: Query
    ) -> dict[str, Any]:
        """Search and return fields of the hits; `query` is the search by vector.

        Raises InvalidRequest, QueueFull, and the errors of `SearchEngine.search`."""
        mode = request.mode or "vector"
        if mode not in MODES:
            raise InvalidRequest(f"expected {', '.join(MODES)}, found {mode!r:.80}", "mode")
        mode = mode if request.vector else WORDS
        depth = min(depth_of(request.k) if mode == "hybrid" else request.k, K_MAX)
        query.k = depth if request.k <= K_MAX else request.k  # the engine refuses too large a k
        word_scores: Scores = {}
        if mode == "vector":
            answer = await self._engine.search(index, query)
        else:
            searching_words = self._by_words(index, words, request.text, depth, query.where)
            if mode == WORDS:
                return _fields(request, mode, index, {}, await searching_words)
            answer, word_scores = await _run_both(
                self._engine.search(index, query), searching_words
            )
        return vector_fields(request, answer) | _fields(
            request, mode, index, _distances(answer), word_scores
        )

    async def _by_words(
        self, index: Index, words: WordIndex, text: str, depth: int, where: Filter | None
    ) -> Scores:
        if depth < 1:
            raise InvalidRequest(f"expected k from 1 to {K_MAX}, found {depth}", "k")
        if self._waiting >= self._waiting_max:
            raise QueueFull(f"{self._waiting} searches by words wait; try again later")
        self._waiting += 1
        try:
            searching = asyncio.get_running_loop().run_in_executor(
                self._threads, _search_words, index, words, text, depth, where
            )
            return await searching
        finally:
            self._waiting -= 1


async def _run_both(by_vector: Any, by_words: Any) -> tuple[SearchAnswer, Scores]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(by_vector), group.create_task(by_words)]
    except* TriviumError as errors:
        raise errors.exceptions[0] from None
    return tasks[0].result(), tasks[1].result()


def _search_words(
    index: Index, words: WordIndex, text: str, depth: int, where: Filter | None
) -> Scores:
    """Return the scores of the best passages by words. Blocks."""
    return dict(words.search(text, depth, _allowed(index, where)))


def _allowed(index: Index, where: Filter | None) -> AllowedPassages | None:
    if where is None:
        return None
    rows, view = index.rows, index.view()
    while view.ids is not rows.ids:  # the index was compacted between the two reads
        rows, view = index.rows, index.view()
    allowed = view.allowed(where)

    def is_allowed(row_id: bytes) -> bool:
        row = rows.row_of.get(row_id, allowed.total)
        return row < allowed.total and bool(int(allowed.bits[row >> 5]) >> (row & 31) & 1)

    def listed() -> Sequence[bytes]:
        ids = (view.ids[row] for row in allowed.rows.tolist())
        return [row_id for row_id in ids if isinstance(row_id, bytes)]

    return AllowedPassages(is_allowed, listed_or_none(allowed.count, listed))


def _distances(answer: SearchAnswer) -> Scores:
    return dict(zip(answer.ids, answer.distances.tolist(), strict=True))


def vector_fields(request: RetrievalRequest, answer: SearchAnswer) -> dict[str, Any]:
    """Return fields of the hits of a search by vector.

    A tenant gets only its hits as seeds: other rows of the routing list may not be for it.
    """
    seeds = answer.ids if request.tenant else answer.top_ids()
    return {
        "document_ids": tuple(map(name_of, answer.ids)),
        "distances": pack_vector(answer.distances),
        "seeds": tuple(map(name_of, seeds)) if request.wants_seeds else (),
        "exact": answer.exact,
        "extends": answer.extends,
        "distances_computed": answer.computed,
        "wait_ms": max(0.0, answer.waited_ms),
    }


def _fields(
    request: RetrievalRequest, mode: str, index: Index, distances: Scores, words: Scores
) -> dict[str, Any]:
    rows = index.rows
    row_of = {name: rows.row_of.get(name, -1) for name in (*distances, *words)}
    row_of = {name: row for name, row in row_of.items() if row >= 0}  # the others are deleted now
    cosines: Scores = {}
    if mode != WORDS and row_of:
        cosines = _cosines(rows, row_of, unpack_vector(request.vector), index.dim)
        row_of = {name: row for name, row in row_of.items() if cosines[name] >= request.min_score}
    nearest = [name for name in distances if name in row_of]
    by_words = [name for name in words if name in row_of]
    fields: dict[str, Any] = {
        "mode": mode,
        "document_ids": tuple(map(name_of, nearest)),
        "distances": pack_vector([distances[name] for name in nearest]),
        "word_ids": tuple(map(name_of, by_words)),
        "word_scores": pack_vector([words[name] for name in by_words]),
    }
    if cosines:
        fields["cosines"] = pack_vector([cosines[name] for name in nearest])
        fields["word_cosines"] = pack_vector([cosines[name] for name in by_words])
    if mode == WORDS:
        fields["exact"] = True
    if request.wants_passages:
        best = candidates(fields["document_ids"], fields["word_ids"], request.k)
        fields["passages"] = texts_of(best, rows, row_of)
    return fields


def _cosines(rows: Rows, row_of: Mapping[ExternalId, int], query: Array, dim: int) -> Scores:
    """Return cosine similarities to the query, for any metric of the index."""
    vectors = rows.vectors[list(row_of.values())][:, :dim].astype(np.float64)
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(query.astype(np.float64))
    cosines = vectors @ query.astype(np.float64) / np.where(norms == 0, 1, norms)
    return dict(zip(row_of, np.clip(cosines, -1, 1).tolist(), strict=True))


def texts_of(
    names: Sequence[str], rows: Rows, row_of: Mapping[ExternalId, int]
) -> tuple[Passage, ...]:
    """Return the passages of the first hits, as many as fit into an answer."""
    payloads = {name_of(name): rows.payloads[row] for name, row in row_of.items()}
    passages, bytes_left = [], _PASSAGE_BYTES_MAX
    for name in names:
        if (payload := payloads.get(name)) is None:
            continue
        bytes_left -= len(payload) + len(name) + _REST_BYTES
        if bytes_left < 0:
            break
        plain = Passage(passage_id=name, document_id=name)
        passages.append(replace(unpack(payload).as_record(), passage_id=name) if payload else plain)
    return tuple(passages)


def name_of(row_id: ExternalId) -> str:
    """Return the id of a row as it is spelled on the log."""
    return row_id.decode() if isinstance(row_id, bytes) else str(row_id)


def rows_allowed(request: RetrievalRequest, tenants: Filter | None) -> Filter | None:
    """Combine the request's own filter with its tenant's; raises InvalidRequest."""
    request_filter = parse(request.filter) if request.filter else None
    if request_filter is None or tenants is None:
        return request_filter or tenants
    return request_filter & tenants
