"""POST /v1/embeddings, /v1/rerank and /score, answered by the retrieval pool's embedding workers.

Ranks and scores compare vectors: a score is the cosine similarity of two texts. No model reads both
together, as a cross-encoder would.
"""

from streams.calls.config import GatewaySettings
from streams.calls.embedding import (
    VALUES_MAX,
    EmbeddingsBody,
    RerankBody,
    ScoreBody,
    embed,
    embed_texts,
    json_of,
    similarities,
    texts_to_rank,
    texts_to_score,
    usage_of,
    vectors_body,
)
from streams.calls.log.pool import RetrievalPool
from streams.calls.request.body import Body, parse
from streams.calls.request.refused import EMBEDDING_REFUSED, refuse_extras
from streams.calls.requests import deadline_of
from streams.gateway.http.delivery import COMPLETED
from streams.gateway.http.entry import Callers, HttpExchange

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORE_PATHS = ("/score", "/v1/score")


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
    scores = similarities(result, 1)
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


async def score(
    callers: Callers, pool: RetrievalPool, settings: GatewaySettings, exchange: HttpExchange
) -> str:
    """Answer with the similarity of each pair of texts, in vLLM's form."""
    body = await _body(callers, exchange, ScoreBody)
    firsts, seconds = texts_to_score(body)
    deadline_ms = deadline_of(exchange.headers, exchange.arrived_ms, settings)
    result = await embed(pool, body.model, [*firsts, *seconds], deadline_ms, exchange.tenant)
    answer = {
        "id": exchange.call_id,
        "object": "list",
        "created": exchange.arrived_ms // 1000,
        "model": result.embedder,
        "data": [
            {"index": i, "object": "score", "score": float(similarity)}
            for i, similarity in enumerate(similarities(result, len(firsts)))
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
