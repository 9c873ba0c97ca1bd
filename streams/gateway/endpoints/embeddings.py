"""POST /v1/embeddings and /v1/rerank, answered by the embedding workers of the retrieval pool.

Ranking compares vectors: the score is the cosine similarity of query and document. No model reads
both together, as a cross-encoder would.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from schemas.errors import InvalidRequest, UnknownModel
from streams.calls.ids import new_request_id
from streams.calls.log.pool import RetrievalPool
from streams.calls.request.body import EMBEDDING_NEUTRAL, Body, parse, refuse_extras
from streams.calls.request.embed_body import (
    VALUES_MAX,
    EmbeddingsBody,
    RerankBody,
    inputs_of,
    texts_to_rank,
)
from streams.calls.request.options import deadline_of
from streams.gateway.http.delivery import COMPLETED
from streams.gateway.http.exchange import HttpExchange
from streams.gateway.state import Gateway
from streams.log.retrieval.embedding import EmbeddedTexts, Texts


async def embeddings(gateway: Gateway, exchange: HttpExchange) -> str:
    """Answer an embeddings call; return the outcome, raise the errors for the caller."""
    body = await _body(gateway, exchange, EmbeddingsBody)
    deadline_ms = _deadline_ms(gateway, exchange)
    result = await embed_texts(gateway.pool, body, deadline_ms, exchange.tenant)
    await exchange.send_whole(vectors_body(result, body), exchange.reply_headers)
    return COMPLETED


async def embed_texts(
    pool: RetrievalPool, body: EmbeddingsBody, deadline_ms: int, tenant: str
) -> EmbeddedTexts:
    """Embed the texts of a body.

    Raises the errors of `RetrievalPool.embed`, InvalidRequest and UnknownModel.
    """
    result = await _embed(pool, body.model, inputs_of(body.input), deadline_ms, tenant)
    dim = result.vectors.shape[1]
    if body.dimensions not in (None, dim):
        raise InvalidRequest(
            f"dimensions: the model has {dim}, found {body.dimensions}; leave it out", "dimensions"
        )
    return result


def vectors_body(result: EmbeddedTexts, body: EmbeddingsBody) -> bytes:
    """Build the body of the answer to an embeddings call."""
    data = [
        {
            "object": "embedding",
            "index": i,
            "embedding": _encode_vector(vector, body.encoding_format),
        }
        for i, vector in enumerate(np.ascontiguousarray(result.vectors, "<f4"))
    ]
    answer = {"object": "list", "data": data, "model": result.embedder, "usage": _usage(result)}
    return _json(answer)


async def rerank(gateway: Gateway, exchange: HttpExchange) -> str:
    """Answer with documents ordered by similarity to a query, the most similar first."""
    body = await _body(gateway, exchange, RerankBody)
    query_and_texts = texts_to_rank(body)
    deadline_ms = _deadline_ms(gateway, exchange)
    result = await _embed(gateway.pool, body.model, query_and_texts, deadline_ms, exchange.tenant)
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
        "usage": _usage(result),
    }
    await exchange.send_whole(_json(answer), exchange.reply_headers)
    return COMPLETED


async def _body(gateway: Gateway, exchange: HttpExchange, kind: type[Body]) -> Body:
    exchange.call_id = new_request_id(exchange.arrived_ms)
    exchange.reply_headers.append((b"x-request-id", exchange.call_id.encode()))
    exchange.tenant = gateway.keys.tenant(exchange.headers)
    raw = await exchange.read_body(gateway.body_reader)
    body = parse(kind, raw, VALUES_MAX)
    refuse_extras(body.model_extra, EMBEDDING_NEUTRAL)
    return body


def _deadline_ms(gateway: Gateway, exchange: HttpExchange) -> int:
    return deadline_of(exchange.headers, exchange.arrived_ms, gateway.settings)


async def _embed(
    pool: RetrievalPool, model: str | None, texts: Texts, deadline_ms: int, tenant: str
) -> EmbeddedTexts:
    result = await pool.embed(texts, deadline_ms=deadline_ms, tenant=tenant)
    name = public_name(result.embedder)
    if model not in (None, "", result.embedder, name):
        raise UnknownModel(f"model: expected {name!r}, found {str(model)[:80]!r}")
    return result


def public_name(embedder: str) -> str:
    """Return the name of an embedding model that callers use: the one without a version."""
    return embedder.partition("@")[0]


def _encode_vector(vector: Any, encoding: str | None) -> Any:
    """Encode a vector as base64 or numbers. The `openai` package asks for base64 by default."""
    return base64.b64encode(vector.tobytes()).decode() if encoding == "base64" else vector


def _usage(result: EmbeddedTexts) -> Mapping[str, int]:
    return {"prompt_tokens": result.tokens, "total_tokens": result.tokens}


def _json(answer: Any) -> bytes:
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
