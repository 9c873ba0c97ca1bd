"""POST /v1/embeddings and /v1/rerank, answered by the embedding workers of the retrieval pool.

Ranking compares vectors: the score is the cosine similarity of query and document. No model reads
both together, as a cross-encoder would.
"""

from streams.calls.config import GatewaySettings
from streams.calls.embedding import (
    VALUES_MAX,
    EmbeddingsBody,
    RerankBody,
    embed,
    embed_texts,
    json_of,
    texts_to_rank,
    usage_of,
    vectors_body,
)
from streams.calls.log.pool import RetrievalPool
from streams.calls.request.body import Body, parse
from streams.calls.request.refused import EMBEDDING_REFUSED, refuse_extras
from streams.calls.requests import deadline_of
from streams.gateway.http.delivery import COMPLETED
from streams.gateway.http.entry import Callers, HttpExchange


async def embeddings(
    callers: Callers, pool: RetrievalPool, settings: GatewaySettings, exchange: HttpExchange
) -> str:
    """Answer an embeddings call; return the outcome, raise the errors for the caller."""
    body = await _body(callers, exchange, EmbeddingsBody)
    deadline_ms = deadline_of(exchange.headers, exchange.arrived_ms, settings)
    result = await embed_texts(pool, body, deadline_ms, exchange.tenant)
    await exchange.send_whole(vectors_body(result, body), exchange.reply_headers)
    return COMPLETED


async def rerank(
    callers: Callers, pool: RetrievalPool, settings: GatewaySettings, exchange: HttpExchange
) -> str:
    """Answer with documents ordered by similarity to a query, the most similar first."""
    body = await _body(callers, exchange, RerankBody)
    query_and_texts = texts_to_rank(body)
    deadline_ms = deadline_of(exchange.headers, exchange.arrived_ms, settings)
    result = await embed(pool, body.model, query_and_texts, deadline_ms, exchange.tenant)
    texts = query_and_texts[1:]
    scores = result.vectors[1:] @ result.vectors[0]
    order = sorted(range(len(texts)), key=lambda i: (-scores[i], i))[: body.top_n]
    answer = {
        "id": exchange.call_id,
        "model": result.embedder,
        "results": [
            {
                "index": i,
                "relevance_score": float(scores[i]),
                **({"document": {"text": texts[i]}} if body.return_documents else {}),
            }
            for i in order
        ],
        "usage": usage_of(result),
    }
    await exchange.send_whole(json_of(answer), exchange.reply_headers)
    return COMPLETED


async def _body(callers: Callers, exchange: HttpExchange, kind: type[Body]) -> Body:
    exchange.begin(callers)
    body = parse(kind, await exchange.read_body(callers.body_reader), VALUES_MAX)
    refuse_extras(body.model_extra, EMBEDDING_REFUSED)
    return body
