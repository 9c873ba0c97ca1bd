"""The routes of /v1/vector_stores: stores of callers' files, and search in them."""

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from schemas.errors import EmptyIndex, InvalidRequest, NotFound, UnknownCollection
from schemas.records import StoreUsed, VectorStore
from schemas.rules.ranks import RANK_OFFSET
from schemas.rules.sizes import PASSAGES_MAX
from streams.calls.ids import STORE_PREFIX, new_object_id
from streams.calls.log.pool import RetrievalPool
from streams.gateway.http.entry import Callers
from streams.log.clock import wall_ms
from streams.log.retrieval.results import Hit, RetrievalResult
from streams.openai.objects.attaching import chunk_sizes, new_specs
from streams.openai.objects.bodies import (
    HybridWeights,
    RankingBody,
    StoreBody,
    StoreChangeBody,
    StoreFileBody,
    StorePaging,
    StoreSearchBody,
)
from streams.openai.objects.filters import filter_text
from streams.openai.objects.log import Objects
from streams.openai.objects.shapes import metadata_text, page, store_json, whole_page

RESULTS = 10  # of a search that names no number
SEARCH_MS = 10_000  # longest time of a search
_MODES = {(True, True): "hybrid", (True, False): "vector", (False, True): "words"}
USED_MS = 60_000  # least time between two records of a store's use


def store_routes(
    callers: Callers, objects: Objects, pool: RetrievalPool, router: APIRouter
) -> None:
    """Add the routes of /v1/vector_stores."""

    @router.post("/v1/vector_stores", tags=["OpenAI"])
    async def create(request: Request) -> dict[str, Any]:
        """Create a vector store, with or without files."""
        return await _create(callers, objects, request)

    @router.get("/v1/vector_stores", tags=["OpenAI"])
    async def list_stores(
        request: Request, paging: Annotated[StorePaging, Query()]
    ) -> dict[str, Any]:
        """List the caller's vector stores, page by page."""
        table, now_ms = objects.table, wall_ms()
        tenant = callers.tenant_of(request)
        return page(
            table.store_order(tenant),
            paging,
            find=lambda store_id: table.store(tenant, store_id),
            shape=lambda store: store_json(table, store, now_ms),
        )

    @router.get("/v1/vector_stores/{vector_store_id}", tags=["OpenAI"])
    async def get_store(vector_store_id: str, request: Request) -> dict[str, Any]:
        """Return a vector store by its id."""
        store = require_store(callers, objects, request, vector_store_id)
        return store_json(objects.table, store, wall_ms())

    @router.post("/v1/vector_stores/{vector_store_id}", tags=["OpenAI"])
    async def change(vector_store_id: str, request: Request) -> dict[str, Any]:
        """Change the name, the metadata or the expiry of a vector store."""
        store = require_store(callers, objects, request, vector_store_id)
        body = await callers.read_body(request, StoreChangeBody)
        await objects.put(_apply_changes(store, body))
        store = require_store(callers, objects, request, vector_store_id)
        return store_json(objects.table, store, wall_ms())

    @router.delete("/v1/vector_stores/{vector_store_id}", tags=["OpenAI"])
    async def delete(vector_store_id: str, request: Request) -> dict[str, Any]:
        """Delete a vector store with its documents; the files stay."""
        store = require_store(callers, objects, request, vector_store_id)
        await objects.put(replace(store, deleted=True))
        return {"id": vector_store_id, "object": "vector_store.deleted", "deleted": True}

    @router.post("/v1/vector_stores/{vector_store_id}/search", tags=["OpenAI"])
    async def search(vector_store_id: str, request: Request) -> dict[str, Any]:
        """Return the passages of a vector store that match one or more queries best."""
        store = require_store(callers, objects, request, vector_store_id, in_use=True)
        body = await callers.read_body(request, StoreSearchBody)
        await note_use(objects, store)
        return await _search(objects, pool, store, body)


def require_store(
    callers: Callers, objects: Objects, request: Request, store_id: str, *, in_use: bool = False
) -> VectorStore:
    """Return the caller's store with this id.

    Raises NotFound, and InvalidRequest if the store has expired and `in_use`.
    """
    table = objects.table
    store = table.store(callers.tenant_of(request), store_id)
    if store is None:
        raise NotFound(f"no such vector store: {store_id[:64]!r}")
    expires_ms = table.expires_ms(store)
    if in_use and expires_ms is not None and wall_ms() >= expires_ms:
        raise InvalidRequest(f"vector store {store_id}: it has expired; make another one")
    return store


async def note_use(objects: Objects, store: VectorStore) -> None:
    """Record that a store was used, which postpones its expiry."""
    now_ms = wall_ms()
    if now_ms - objects.table.used_ms(store) >= USED_MS:
        used = StoreUsed(store_id=store.store_id, tenant=store.tenant, at_ms=now_ms)
        await objects.put(used)


async def _create(callers: Callers, objects: Objects, request: Request) -> dict[str, Any]:
    tenant, now_ms = callers.tenant_of(request), wall_ms()
    body = await callers.read_body(request, StoreBody)
    tokens, overlap = chunk_sizes(body.chunking_strategy)
    store = VectorStore(
        store_id=new_object_id(STORE_PREFIX, now_ms),
        tenant=tenant,
        name=body.name or "",
        description=body.description or "",
        metadata=metadata_text(body.metadata),
        created_ms=now_ms,
        expires_days=body.expires_after.days if body.expires_after is not None else 0,
        chunk_tokens=tokens,
        chunk_overlap=overlap,
    )
    table = objects.table
    files = [StoreFileBody(file_id=file_id) for file_id in dict.fromkeys(body.file_ids or ())]
    await objects.put(store, *new_specs(table, store, files, "", now_ms))
    return store_json(objects.table, store, now_ms)


def _apply_changes(store: VectorStore, body: StoreChangeBody) -> VectorStore:
    set_fields = body.model_fields_set
    if "name" in set_fields:
        store = replace(store, name=body.name or "")
    if "metadata" in set_fields:
        store = replace(store, metadata=metadata_text(body.metadata))
    if "expires_after" in set_fields:
        days = body.expires_after.days if body.expires_after is not None else 0
        store = replace(store, expires_days=days)
    return store


async def _search(
    objects: Objects, pool: RetrievalPool, store: VectorStore, body: StoreSearchBody
) -> dict[str, Any]:
    queries, ranking = body.queries(), body.ranking_options or RankingBody()
    k, weights = body.max_num_results or RESULTS, _weights(ranking)
    options: dict[str, Any] = {
        "collection": store.store_id,
        "tenant": store.tenant,
        "k": PASSAGES_MAX if weights.count(0) == 0 and len(set(weights)) > 1 else k,
        "mode": _MODES[weights[0] > 0, weights[1] > 0],
        "filter": filter_text(body.filters),
        "min_score": ranking.score_threshold if ranking.score_threshold is not None else -1.0,
        "deadline_ms": wall_ms() + SEARCH_MS,
    }
    searches = (pool.search_text(query, **options) for query in queries)
    answers = [
        answer for answer in await asyncio.gather(*map(_or_none, searches)) if answer is not None
    ]
    best: dict[str, Hit] = {}
    for hit in (hit for answer in answers for hit in reweight(answer.hits, weights)):
        if hit.document_id not in best or hit.fused > best[hit.document_id].fused:
            best[hit.document_id] = hit
    ordered = sorted(best.values(), key=lambda hit: (-hit.fused, hit.document_id))
    results = [result for hit in ordered if (result := _result(objects, store, hit)) is not None]
    gaps = _gaps(answers)
    extras = {"trivium": gaps} if gaps else {}
    name = "vector_store.search_results.page"
    return whole_page(results[:k], name, search_query=queries, **extras)


async def _or_none(search: Any) -> RetrievalResult | None:
    """Return the result of a search, or None if the store has no documents and thus no collection
    yet."""
    try:
        answer: RetrievalResult = await search
    except (UnknownCollection, EmptyIndex):
        return None
    return answer


def _weights(ranking: RankingBody) -> tuple[float, float]:
    """Return the weights of vectors and of words; raises InvalidRequest if both are 0."""
    hybrid = ranking.hybrid_search or HybridWeights()
    if not hybrid.embedding_weight and not hybrid.text_weight:
        raise InvalidRequest(
            "ranking_options.hybrid_search: expected a weight above 0, found none",
            "ranking_options.hybrid_search",
        )
    return hybrid.embedding_weight, hybrid.text_weight


def reweight(hits: Sequence[Hit], weights: tuple[float, float]) -> list[Hit]:
    """Compute the fused scores again with these weights, from the ranks of the hits among each
    other."""
    if len(set(weights)) == 1 or 0 in weights:
        return list(hits)
    near = sorted((hit for hit in hits if hit.distance < inf), key=lambda hit: hit.distance)
    by_words = sorted((hit for hit in hits if hit.words), key=lambda hit: -(hit.words or 0))
    scores = dict.fromkeys((hit.document_id for hit in hits), 0.0)
    for weight, ordered in zip(weights, (near, by_words), strict=True):
        for rank, hit in enumerate(ordered, 1):
            scores[hit.document_id] += weight / sum(weights) / (RANK_OFFSET + rank)
    return [replace(hit, fused=scores[hit.document_id]) for hit in hits]


def _result(objects: Objects, store: VectorStore, hit: Hit) -> dict[str, Any] | None:
    """Build a search result; None if its file has left the store but not the index yet."""
    if hit.passage is None:
        return None
    file_id = hit.passage.document_id.partition("/")[0]
    table = objects.table
    entry, file = table.contents(store).entry(file_id), table.file(store.tenant, file_id)
    if entry is None or file is None:
        return None
    return {
        "file_id": file_id,
        "filename": file.filename,
        "score": max(0.0, hit.score),
        "attributes": json.loads(entry.spec.attributes or "{}"),
        "content": [{"type": "text", "text": hit.passage.text}],
    }


def _gaps(answers: Iterable[RetrievalResult]) -> dict[str, Any]:
    """Return the fields that say what the results lack; empty if they are complete."""
    missing = sorted({shard for answer in answers for shard in answer.missing})
    degraded = next((answer.degraded for answer in answers if answer.degraded), "")
    gaps: dict[str, Any] = {"missing_shards": missing} if missing else {}
    return gaps | ({"degraded": degraded} if degraded else {})
