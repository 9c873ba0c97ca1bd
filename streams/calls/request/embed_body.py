"""Bodies of the endpoints that need only vectors of texts, and the texts in them."""

from typing import Any, Literal

from pydantic import Field

from schemas.errors import InvalidRequest
from schemas.rules.sizes import TEXTS_MAX
from streams.calls.errors import shorten
from streams.calls.request.body import PromptField, StrictBody, Whole, whole_numbers
from streams.log.retrieval.embedding import Texts

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
