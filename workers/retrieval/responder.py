"""Answers a retrieval: checks it, searches, and returns its hits or an error.

Every retrieval gets an answer; no request can end the worker.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from schemas.errors import DeadlineExceeded, EngineFailed, InvalidRequest, TriviumError
from schemas.records import Hits, Quoted, RetrievalRequest, WireError
from schemas.retrieval import CHECK, shard_of, unpack_vector
from schemas.rules.metadata import TENANT
from schemas.rules.sizes import QUOTED_MAX, SEEDS_MAX
from streams.log.clock import wall_ms
from workers.retrieval.collections import Collections
from workers.retrieval.passages.texts import row_id, unpack
from workers.retrieval.settings import RetrievalSettings, ShardPlace
from workers.retrieval.tallies import RetrievalTallies
from workers.retrieval.text_search import TextSearches, rows_allowed, texts_of, vector_fields
from workers.vector.engine.engine import SearchEngine
from workers.vector.index.index import Index
from workers.vector.index.kinds import SearchKind
from workers.vector.index.query import ExternalId, Query, SearchAnswer
from workers.vector.index.rows import Rows

log = logging.getLogger("trivium.retrieval")


class Responder:
    """Answers retrievals from the collections of one shard."""

    def __init__(
        self,
        engine: SearchEngine,
        collections: Collections,
        settings: RetrievalSettings,
        *,
        worker_id: str,
        place: ShardPlace,
    ) -> None:
        self._engine = engine
        self.texts = TextSearches(engine, settings.queue_max, settings.word_threads)
        self._collections = collections
        self._settings = settings
        self._worker_id, self._place = worker_id, place
        self.tallies = RetrievalTallies()

    async def hits(self, request: RetrievalRequest, kind: SearchKind) -> Hits:
        """Search and return the hits, with an error if the search failed; raises nothing."""
        began_s = time.perf_counter()
        hits = await self._hits(request, kind)
        if request.mode != CHECK:
            self.tallies.by_kind[kind].add(hits, 1_000 * (time.perf_counter() - began_s))
        return hits

    async def _hits(self, request: RetrievalRequest, kind: SearchKind) -> Hits:
        began_ms = wall_ms()
        extras: dict[str, Any] = {}
        try:
            if request.deadline_ms <= began_ms:
                raise DeadlineExceeded(
                    f"the deadline passed {began_ms - request.deadline_ms} ms before the retrieval "
                    "was read; give it more time"
                )
            extras["changed"] = self._changed(request)
            fields = {"mode": CHECK} if request.mode == CHECK else await self._search(request, kind)
        except TriviumError as error:
            return self._record(request, began_ms, error=error.to_wire(), **extras)
        except Exception:
            log.exception("retrieval %s failed", request.retrieval_id)
            failure = EngineFailed(f"the search failed; the log of {self._worker_id} says why")
            return self._record(request, began_ms, error=failure.to_wire(), **extras)
        return self._record(request, began_ms, **fields, **extras)

    def _changed(self, request: RetrievalRequest) -> tuple[str, ...]:
        """Return this shard's quoted documents that changed; needs no index of the collection."""
        if (count := len(request.quoted)) > QUOTED_MAX:
            raise InvalidRequest(
                f"expected at most {QUOTED_MAX} quoted documents, found {count}", "quoted"
            )
        name, tenant = request.collection, request.tenant
        index = self._collections.indexes.get(name)
        if not self._collections.declared.allows(name, tenant):
            index = None
        return changed_quotes(request.quoted, index, tenant, self._place.shard, self._place.shards)

    async def _search(self, request: RetrievalRequest, kind: SearchKind) -> dict[str, Any]:
        """Search and return fields of the hits; raises a TriviumError."""
        collections, name = self._collections, request.collection
        index = collections.get(name, request.tenant)
        query = self._query(request, kind, index)
        if request.vector:
            collections.check_embedder(name, request.embedder)
        if request.text:
            return await self.texts.find(request, index, collections.words(name), query)
        return _fields(request, index, await self._engine.search(index, query))

    def refused(self, request: RetrievalRequest, error: TriviumError) -> Hits:
        """Return an error record in place of hits that are too large to send."""
        return self._record(request, wall_ms(), error=error.to_wire())

    def _query(self, request: RetrievalRequest, kind: SearchKind, index: Index) -> Query:
        if len(request.seeds) > SEEDS_MAX:
            raise InvalidRequest(
                f"expected at most {SEEDS_MAX} seeds, found {len(request.seeds)}", "seeds"
            )
        tenants = self._collections.rows_for(request.tenant, index)
        return Query(
            vector=unpack_vector(request.vector),
            k=request.k,
            top_m=request.top_m or self._settings.top_m,
            recall=0.0 if request.top_m else self._settings.recall_of(request.collection),
            width=request.width or self._settings.width,
            patience=request.patience or self._settings.patience,
            where=rows_allowed(request, tenants),
            seeds=_rows(request.seeds, index.rows.row_of),
            kind=kind,
            deadline_ms=request.deadline_ms,
        )

    def _record(
        self,
        request: RetrievalRequest,
        began_ms: int,
        *,
        error: WireError | None = None,
        **fields: Any,
    ) -> Hits:
        now_ms = wall_ms()
        return Hits(
            retrieval_id=request.retrieval_id,
            request_id=request.request_id,
            worker_id=self._worker_id,
            shard=self._place.shard,
            shards=self._place.shards,
            collection=request.collection,
            error=error,
            took_ms=max(0, now_ms - began_ms),  # a wall clock may be set back
            at_ms=now_ms,
            embedded_ms=max(0.0, request.embedded_ms),
            **fields,
        )


def _fields(request: RetrievalRequest, index: Index, answer: SearchAnswer) -> dict[str, Any]:
    """Return fields of the hits of a search by the request's own vector."""
    fields = vector_fields(request, answer)
    if request.wants_passages:
        row_of = index.rows.row_of
        rows = {row_id: row_of[row_id] for row_id in answer.ids if row_id in row_of}
        fields["passages"] = texts_of(fields["document_ids"], index.rows, rows)
    return fields


def _rows(seeds: Sequence[str], row_of: Mapping[ExternalId, int]) -> list[int]:
    rows = (row_of.get(seed, row_of.get(seed.encode(errors="replace"))) for seed in seeds)
    return [row for row in rows if row is not None]


def changed_quotes(
    quoted: Iterable[Quoted], index: Index | None, tenant: str, shard: int, shards: int
) -> tuple[str, ...]:
    """Return the quoted documents of this shard that are gone, changed, or not for the tenant.

    `index` is the collection's, None if the tenant may not search it.
    """
    own_quotes = {quote for quote in quoted if shard_of(quote.document_id, shards) == shard}
    rows = index.rows if index is not None else None
    names = {
        quote.document_id
        for quote in own_quotes
        if rows is None
        or not quote.content
        or _content(rows, quote.document_id, tenant) != quote.content
    }
    return tuple(sorted(names))


def _content(rows: Rows, document_id: str, tenant: str) -> str:
    """Return the content hash of a document's passages; empty if the tenant may find none."""
    row = rows.row_of.get(row_id(document_id, 0))
    if row is None or (tenant and not rows.columns.has_or_lacks(TENANT, tenant, row)):
        return ""
    return unpack(rows.payloads[row]).content
