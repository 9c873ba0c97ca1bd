"""Answers a search for a text: the nearest by its vector, the best by its words, and their texts.

Both go on at once: the vector through the engine, words on threads of their own, so that neither
holds up the event loop. Less similar hits than wanted are left out of both lists before they are
ranked. Of passages only those are sent that may be among the k best of all shards.
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
from workers.search.engine.engine import SearchEngine
from workers.search.index.index import Index
from workers.search.index.query import Answer, ExternalId, Query
from workers.search.index.rows import Rows
from workers.search.limits import K_MAX
from workers.search.metadata import expressions
from workers.search.metadata.filters import Filter
from workers.search.words.index import Allowed, WordIndex, listed_or_none
from workers.search.words.texts import unpacked

Array = np.ndarray[Any, Any]
Scored = Mapping[ExternalId, float]
_PASSAGE_BYTES_MAX = RETRIEVAL_BYTES_MAX * 3 // 4  # of all in one answer
_REST_BYTES = 64  # of each, beside text, tokens and names


class TextSearches:
    """`find` any number of times at once, then `close`."""

    def __init__(self, engine: SearchEngine, waiting_max: int, threads: int) -> None:
        self._engine = engine
        self._waiting, self._waiting_max = 0, waiting_max
        self._threads = ThreadPoolExecutor(threads, "search-words")

    def close(self) -> None:
        """What waits is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def find(
        self, request: RetrievalRequest, index: Index, words: WordIndex, query: Query
    ) -> dict[str, Any]:
        """Fields of the hits; `query` is the search by the vector, if there is one."""
        mode = request.mode or "vector"
        if mode not in MODES:
            raise InvalidRequest(f"expected {', '.join(MODES)}, found {mode!r:.80}", "mode")
        mode = mode if request.vector else WORDS
        depth = min(depth_of(request.k) if mode == "hybrid" else request.k, K_MAX)
        query.k = depth if request.k <= K_MAX else request.k  # what is too much is refused there
        scored: Scored = {}
        if mode == "vector":
            answer = await self._engine.search(index, query)
        else:
            by_words = self._by_words(index, words, request.text, depth, query.where)
            if mode == WORDS:
                return _fields(request, mode, index, {}, await by_words)
            answer, scored = await _both(self._engine.search(index, query), by_words)
        return about(request, answer) | _fields(request, mode, index, _distances(answer), scored)

    async def _by_words(
        self, index: Index, words: WordIndex, text: str, depth: int, where: Filter | None
    ) -> Scored:
        if depth < 1:
            raise InvalidRequest(f"expected k from 1 to {K_MAX}, found {depth}", "k")
        if self._waiting >= self._waiting_max:
            raise QueueFull(f"{self._waiting} searches by words wait; try again later")
        self._waiting += 1
        try:
            searching = asyncio.get_running_loop().run_in_executor(
                self._threads, _searched, index, words, text, depth, where
            )
            return await searching
        finally:
            self._waiting -= 1


async def _both(by_vector: Any, by_words: Any) -> tuple[Answer, Scored]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(by_vector), group.create_task(by_words)]
    except* TriviumError as errors:
        raise errors.exceptions[0] from None
    return tasks[0].result(), tasks[1].result()


def _searched(
    index: Index, words: WordIndex, text: str, depth: int, where: Filter | None
) -> Scored:
    """Blocks."""
    return dict(words.search(text, depth, _allowed(index, where)))


def _allowed(index: Index, where: Filter | None) -> Allowed | None:
    if where is None:
        return None
    rows, view = index.rows, index.view()
    while view.ids is not rows.ids:  # it was compacted just now
        rows, view = index.rows, index.view()
    allowed = view.allowed(where)

    def holds(each: bytes) -> bool:
        row = rows.row_of.get(each, allowed.total)
        return row < allowed.total and bool(int(allowed.bits[row >> 5]) >> (row & 31) & 1)

    def listed() -> Sequence[bytes]:
        named = (view.ids[row] for row in allowed.rows.tolist())
        return [each for each in named if isinstance(each, bytes)]

    return Allowed(holds, listed_or_none(allowed.count, listed))


def _distances(answer: Answer) -> Scored:
    return dict(zip(answer.ids, answer.distances.tolist(), strict=True))


def about(request: RetrievalRequest, answer: Answer) -> dict[str, Any]:
    """Fields of the hits of a search by a vector.

    A tenant is told nothing of where a search came by that it may not find.
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
    request: RetrievalRequest, mode: str, index: Index, distances: Scored, words: Scored
) -> dict[str, Any]:
    rows = index.rows
    row_of = {each: rows.row_of.get(each, -1) for each in (*distances, *words)}
    row_of = {each: row for each, row in row_of.items() if row >= 0}  # else it is deleted by now
    cosines: Scored = {}
    if mode != WORDS and row_of:
        cosines = _cosines(rows, row_of, unpack_vector(request.vector), index.dim)
        row_of = {each: row for each, row in row_of.items() if cosines[each] >= request.min_score}
    nearest = [each for each in distances if each in row_of]
    by_words = [each for each in words if each in row_of]
    found: dict[str, Any] = {
        "mode": mode,
        "document_ids": tuple(map(name_of, nearest)),
        "distances": pack_vector([distances[each] for each in nearest]),
        "word_ids": tuple(map(name_of, by_words)),
        "word_scores": pack_vector([words[each] for each in by_words]),
    }
    if cosines:
        found["cosines"] = pack_vector([cosines[each] for each in nearest])
        found["word_cosines"] = pack_vector([cosines[each] for each in by_words])
    if mode == WORDS:
        found["exact"] = True
    if request.wants_passages:
        best = candidates(found["document_ids"], found["word_ids"], request.k)
        found["passages"] = texts_of(best, rows, row_of)
    return found


def _cosines(rows: Rows, row_of: Mapping[ExternalId, int], query: Array, dim: int) -> Scored:
    """Similarities to the query, whatever the index measures."""
    vectors = rows.vectors[list(row_of.values())][:, :dim].astype(np.float64)
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(query.astype(np.float64))
    cosines = vectors @ query.astype(np.float64) / np.where(norms == 0, 1, norms)
    return dict(zip(row_of, np.clip(cosines, -1, 1).tolist(), strict=True))


def texts_of(
    names: Sequence[str], rows: Rows, row_of: Mapping[ExternalId, int]
) -> tuple[Passage, ...]:
    """Texts of hits, as many as fit, the first ones first."""
    payloads = {name_of(each): rows.payloads[row] for each, row in row_of.items()}
    found, room = [], _PASSAGE_BYTES_MAX
    for name in names:
        if (payload := payloads.get(name)) is None:
            continue
        room -= len(payload) + len(name) + _REST_BYTES
        if room < 0:
            break
        bare = Passage(passage_id=name, document_id=name)
        found.append(replace(unpacked(payload).as_record(), passage_id=name) if payload else bare)
    return tuple(found)


def name_of(row_id: ExternalId) -> str:
    """The id of a row as the log has it."""
    return row_id.decode() if isinstance(row_id, bytes) else str(row_id)


def rows_allowed(request: RetrievalRequest, tenants: Filter | None) -> Filter | None:
    """What the asker allows, and what its tenant may see."""
    asked = expressions.parse(request.filter) if request.filter else None
    if asked is None or tenants is None:
        return asked or tenants
    return asked & tenants
