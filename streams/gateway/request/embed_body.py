"""Bodies of the endpoints that need vectors of texts only, and the texts that they hold."""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from schemas.errors import InvalidRequest
from schemas.rules.sizes import TEXTS_MAX
from streams.gateway.http.errors import shown
from streams.gateway.request.body import StrictBody

TEXT_CHARS_MAX = 65_536  # of each; embedding models see the beginning
Input = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


class EmbeddingsBody(StrictBody):
    """POST /v1/embeddings."""

    model: str
    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None


class RerankBody(StrictBody):
    """POST /v1/rerank, in Cohere's and Jina's form."""

    model: str
    query: str = Field(min_length=1, max_length=TEXT_CHARS_MAX)
    documents: list[str | dict[str, Any]] = Field(min_length=1, max_length=TEXTS_MAX - 1)
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None


def texts_of(value: Any) -> list[str]:
    """The texts of an `input`; raises InvalidRequest."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and texts and isinstance(texts[0], int | list):
        raise InvalidRequest(
            "input: expected texts, found token ids, which belong to another model's tokenizer; "
            "send texts (LangChain: check_embedding_ctx_length=False)",
            "input",
        )
    if not isinstance(texts, list) or not 0 < len(texts) <= TEXTS_MAX:
        raise InvalidRequest(
            f"input: expected a text or 1 to {TEXTS_MAX} texts, found {shown(value)}", "input"
        )
    return [_text(text, f"input.{i}") for i, text in enumerate(texts)]


def documents_of(body: RerankBody) -> list[str]:
    """The texts of documents that are to be ranked; raises InvalidRequest."""
    return [
        _text(each.get("text") if isinstance(each, dict) else each, f"documents.{i}")
        for i, each in enumerate(body.documents)
    ]


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= TEXT_CHARS_MAX:
        raise InvalidRequest(
            f"{where}: expected a text of 1 to {TEXT_CHARS_MAX} characters, found {shown(value)}",
            where,
        )
    return value
