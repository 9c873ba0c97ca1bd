"""Calls that need only vectors of texts: their bodies, the texts in them, and the answers."""

import base64
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import orjson
from pydantic import Field

from schemas.errors import InvalidRequest, UnknownModel
from schemas.rules.embedders import public_name
from schemas.rules.sizes import TEXTS_MAX
from streams.calls.errors import shorten
from streams.calls.log.pool import RetrievalPool
from streams.calls.request.body import PromptField, StrictBody, Strings, Whole, whole_numbers
from streams.log.retrieval.embedding import EmbeddedTexts, Texts

TEXT_CHARS_MAX = 65_536  # of each text: embedding models read its beginning only
VALUES_MAX = 262_144  # of a body: token ids of all texts, or all other values
_TOKEN_ID_MAX = 2**31 - 1


class EmbeddingsBody(StrictBody):
    """The body of POST /v1/embeddings."""

    model: str | None = None
    input: PromptField
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Whole | None = Field(None, ge=1)
    user: str | None = None
    cache_salt: str | None = None  # ignored: vectors are not cached by caller


class RerankBody(StrictBody):
    """The body of POST /v1/rerank, in Cohere's and Jina's form."""

    model: str | None = None
    query: str = Field(min_length=1)
    documents: list[str | dict[str, Any]] = Field(min_length=1, max_length=TEXTS_MAX - 1)
    top_n: Whole | None = Field(None, ge=1)
    return_documents: bool | None = None
    user: str | None = None
    cache_salt: str | None = None  # ignored: vectors are not cached by caller


class ScoreBody(StrictBody):
    """The body of POST /score: two fields, each a text or several, in one of vLLM's forms."""

    model: str | None = None
    queries: Strings = None
    documents: Strings = None
    items: Strings = None
    text_1: Strings = None
    text_2: Strings = None
    data_1: Strings = None
    data_2: Strings = None
    user: str | None = None
    cache_salt: str | None = None  # ignored: vectors are not cached by caller


# The names of the two fields of a score.
_SCORED = (
    ("queries", "documents"),
    ("queries", "items"),
    ("text_1", "text_2"),
    ("data_1", "data_2"),
)


def inputs_of(value: Any) -> Texts:
    """Return the texts of an `input`, or the token ids of each text; raises InvalidRequest."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and texts and not isinstance(texts[0], str | list):
        texts = [texts]
    if not isinstance(texts, list) or not 0 < len(texts) <= TEXTS_MAX:
        raise InvalidRequest(
            f"input: expected a text or 1 to {TEXTS_MAX} texts, found {shorten(value)}", "input"
        )
    if isinstance(texts[0], list):
        return [_token_ids(ids, f"input.{i}") for i, ids in enumerate(texts)]
    return [_text(text, f"input.{i}") for i, text in enumerate(texts)]


def texts_to_rank(body: RerankBody) -> list[str]:
    """Return the query and the texts to rank; raises InvalidRequest."""
    return [
        _text(body.query, "query"),
        *(
            _text(
                document.get("text") if isinstance(document, dict) else document, f"documents.{i}"
            )
            for i, document in enumerate(body.documents)
        ),
    ]


def texts_to_score(body: ScoreBody) -> tuple[list[str], list[str]]:
    """Return the texts that are compared: one with each of the others, or as many pairwise; raises
    InvalidRequest."""
    set_names = {name for names in _SCORED for name in names if getattr(body, name) is not None}
    names = next((pair for pair in _SCORED if set(pair) == set_names), None)
    if names is None:
        raise InvalidRequest(
            "queries: expected queries and documents, or queries and items, text_1 and text_2, or "
            f"data_1 and data_2, found {', '.join(sorted(set_names)) or 'none of them'}",
            "queries",
        )
    firsts, seconds = (_texts(getattr(body, name), name) for name in names)
    if len(firsts) not in (1, len(seconds)):
        raise InvalidRequest(
            f"{names[1]}: expected as many texts as {names[0]}, or one there, found {len(seconds)} "
            f"for {len(firsts)}",
            names[1],
        )
    if len(firsts) + len(seconds) > TEXTS_MAX:
        raise InvalidRequest(
            f"{names[1]}: expected at most {TEXTS_MAX} texts with {names[0]}, found "
            f"{len(firsts) + len(seconds)}",
            names[1],
        )
    return firsts, seconds


def _texts(value: Any, name: str) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    if not texts:
        raise InvalidRequest(f"{name}: expected a text or several, found {shorten(value)}", name)
    wheres = [f"{name}.{i}" for i in range(len(texts))] if texts is value else [name]
    return [_text(text, where) for text, where in zip(texts, wheres, strict=True)]


def similarities(result: EmbeddedTexts, firsts: int) -> Any:
    """Return the cosine similarity of the first texts, one or all, with each of the others."""
    return (result.vectors[:firsts] * result.vectors[firsts:]).sum(axis=1)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}: expected a text, found {shorten(value)}", where)
    return value[:TEXT_CHARS_MAX]


def _token_ids(value: Any, where: str) -> list[int]:
    """Check ids of the embedding model's tokenizer; only its worker knows the size of the
    vocabulary."""
    ids = whole_numbers(value)
    if not ids or not 0 <= min(ids) <= max(ids) <= _TOKEN_ID_MAX:
        raise InvalidRequest(
            f"{where}: expected texts, or token ids of the embedding model, found {shorten(value)}",
            where,
        )
    return ids[:TEXT_CHARS_MAX]


async def embed_texts(
    pool: RetrievalPool, body: EmbeddingsBody, deadline_ms: int, tenant: str
) -> EmbeddedTexts:
    """Embed the texts of a body.

    Raises the errors of `RetrievalPool.embed`, InvalidRequest and UnknownModel.
    """
    result = await embed(pool, body.model, inputs_of(body.input), deadline_ms, tenant)
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
    answer = {"object": "list", "data": data, "model": result.embedder, "usage": usage_of(result)}
    return json_of(answer)


async def embed(
    pool: RetrievalPool, model: str | None, texts: Texts, deadline_ms: int, tenant: str
) -> EmbeddedTexts:
    """Embed texts by the model of this name; raises UnknownModel, and the errors of the pool."""
    result = await pool.embed(texts, deadline_ms=deadline_ms, tenant=tenant, embedder=model or "")
    name = public_name(result.embedder)
    if model not in (None, "", result.embedder, name):
        raise UnknownModel(f"model: expected {name!r}, found {str(model)[:80]!r}")
    return result


def _encode_vector(vector: Any, encoding: str | None) -> Any:
    """Encode a vector as base64 or numbers. The `openai` package asks for base64 by default."""
    return base64.b64encode(vector.tobytes()).decode() if encoding == "base64" else vector


def usage_of(result: EmbeddedTexts) -> Mapping[str, int]:
    """Return the tokens that were embedded, in OpenAI's form."""
    return {"prompt_tokens": result.tokens, "total_tokens": result.tokens}


def json_of(answer: Any) -> bytes:
    """Return an answer with vectors as JSON."""
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
