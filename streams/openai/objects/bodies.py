"""Bodies and queries of calls about files, vector stores and conversations, with checks of types
and ranges."""

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from schemas.errors import InvalidRequest
from streams.calls.errors import shorten

FILES_MAX = 2_000  # of one batch
PAIRS_MAX, KEY_CHARS_MAX, VALUE_CHARS_MAX = 16, 64, 512
NUMBER_MAX = 2**53  # of an attribute: floats store these exactly
NAME_CHARS_MAX = 1_000
ITEMS_MAX = 20  # of a conversation, added in one call
QUERY_CHARS_MAX, QUERIES_MAX, RESULTS_MAX = 8_192, 16, 50
Values = dict[str, str | float | bool]
_Id = Annotated[str, Field(min_length=1, max_length=64)]
_Key = Annotated[str, Field(min_length=1, max_length=KEY_CHARS_MAX)]
Texts = Annotated[
    dict[_Key, Annotated[str, Field(max_length=VALUE_CHARS_MAX)]],
    Field(max_length=PAIRS_MAX),
]


class _StoreModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class FilePaging(BaseModel):
    """Selects a page of a list of files."""

    limit: int = Field(10_000, ge=1, le=10_000)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = Field(None, max_length=64)
    before: None = None
    purpose: str | None = Field(None, max_length=64)


class StorePaging(BaseModel):
    """Selects a page of a list."""

    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = Field(None, max_length=64)
    before: str | None = Field(None, max_length=64)


class StoreFilePaging(StorePaging):
    """Selects a page of a vector store's files."""

    filter: Literal["in_progress", "completed", "failed", "cancelled"] | None = None


class ItemPaging(BaseModel):
    """Selects a page of a conversation's items."""

    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = Field(None, max_length=256)


class Expiry(_StoreModel):
    """When an unused vector store expires and its files are removed."""

    anchor: Literal["last_active_at"]
    days: int = Field(ge=1, le=365)


class AutoChunks(_StoreModel):
    """Splits texts into chunks with the deployment's sizes."""

    type: Literal["auto"]


class ChunkSizes(_StoreModel):
    """Sizes of chunks in tokens of the embedding model."""

    max_chunk_size_tokens: int = Field(ge=100, le=4_096)
    chunk_overlap_tokens: int = Field(ge=0, le=2_048)


class StaticChunks(_StoreModel):
    """Splits texts into chunks of the given sizes."""

    type: Literal["static"]
    static: ChunkSizes


Chunks = Annotated[AutoChunks | StaticChunks, Field(discriminator="type")]
Attributes = Annotated[
    dict[str, Any] | None,
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "maxProperties": PAIRS_MAX,
                    "additionalProperties": {
                        "anyOf": [
                            {"type": "string", "maxLength": VALUE_CHARS_MAX},
                            {"type": "number"},
                            {"type": "boolean"},
                        ]
                    },
                },
                {"type": "null"},
            ]
        }
    ),
]


class StoreBody(_StoreModel):
    """The body of POST /v1/vector_stores."""

    name: str | None = Field(None, max_length=NAME_CHARS_MAX)
    description: str | None = Field(None, max_length=NAME_CHARS_MAX)
    file_ids: list[_Id] | None = Field(None, max_length=FILES_MAX)
    metadata: Texts | None = None
    expires_after: Expiry | None = None
    chunking_strategy: Chunks | None = None


class StoreChangeBody(_StoreModel):
    """The body of POST /v1/vector_stores/{id}; fields that are left out stay unchanged."""

    name: str | None = Field(None, max_length=NAME_CHARS_MAX)
    metadata: Texts | None = None
    expires_after: Expiry | None = None


class StoreFileBody(_StoreModel):
    """The body of POST /v1/vector_stores/{id}/files, and each of `files` in a batch."""

    file_id: _Id
    attributes: Attributes = None
    chunking_strategy: Chunks | None = None


class AttributesBody(_StoreModel):
    """The body of POST /v1/vector_stores/{id}/files/{file_id}."""

    attributes: Attributes


class BatchBody(_StoreModel):
    """The body of POST /v1/vector_stores/{id}/file_batches."""

    file_ids: list[_Id] | None = Field(None, min_length=1, max_length=FILES_MAX)
    files: list[StoreFileBody] | None = Field(None, min_length=1, max_length=FILES_MAX)
    attributes: Attributes = None
    chunking_strategy: Chunks | None = None

    def file_bodies(self) -> list[StoreFileBody]:
        """Return one body per file, the last one of each id; raises InvalidRequest."""
        if (self.file_ids is None) == (self.files is None):
            raise InvalidRequest("file_ids: expected either file_ids or files", "file_ids")
        bodies = self.files or [
            StoreFileBody(
                file_id=file_id,
                attributes=self.attributes,
                chunking_strategy=self.chunking_strategy,
            )
            for file_id in self.file_ids or ()
        ]
        return list({body.file_id: body for body in bodies}.values())


class HybridWeights(_StoreModel):
    """Weights of similarity and of words in hybrid search."""

    embedding_weight: float = Field(default=1.0, ge=0, le=1_000)
    text_weight: float = Field(default=1.0, ge=0, le=1_000)


class RankingBody(_StoreModel):
    """How results are ranked, and which scores are high enough."""

    ranker: Literal["none", "auto", "default-2024-11-15", "default_2024_08_21"] | None = None
    score_threshold: float | None = Field(default=None, ge=0, le=1)
    hybrid_search: HybridWeights | None = None


class StoreSearchBody(_StoreModel):
    """The body of POST /v1/vector_stores/{id}/search."""

    query: str | list[str]
    max_num_results: int | None = Field(None, ge=1, le=RESULTS_MAX)
    filters: dict[str, Any] | None = None
    ranking_options: RankingBody | None = None
    rewrite_query: bool | None = None

    def queries(self) -> list[str]:
        """Return the queries of the search; raises InvalidRequest."""
        queries = [self.query] if isinstance(self.query, str) else self.query
        if not 0 < len(queries) <= QUERIES_MAX:
            raise InvalidRequest(
                f"query: expected 1 to {QUERIES_MAX} texts, found {len(queries)}", "query"
            )
        for query in queries:
            if not query.strip() or len(query) > QUERY_CHARS_MAX:
                raise InvalidRequest(
                    f"query: expected a text of 1 to {QUERY_CHARS_MAX} characters, found "
                    f"{shorten(query)}",
                    "query",
                )
        if self.rewrite_query:
            raise InvalidRequest(
                "rewrite_query: queries are not rewritten here; leave it out", "rewrite_query"
            )
        return queries


class ConversationBody(_StoreModel):
    """The body of POST /v1/conversations."""

    items: list[dict[str, Any]] | None = Field(None, max_length=ITEMS_MAX)
    metadata: Texts | None = None


class ConversationChangeBody(_StoreModel):
    """The body of POST /v1/conversations/{id}."""

    metadata: Texts | None


class ConversationItemsBody(_StoreModel):
    """The body of POST /v1/conversations/{id}/items."""

    items: list[dict[str, Any]] = Field(min_length=1, max_length=ITEMS_MAX)


def attributes_text(attributes: Mapping[str, Any] | None) -> str:
    """Return attributes as JSON for the log; raises InvalidRequest."""
    where = "attributes"
    if len(attributes or {}) > PAIRS_MAX:
        raise InvalidRequest(f"{where}: expected at most {PAIRS_MAX}, found more", where)
    for key, value in (attributes or {}).items():
        if not 0 < len(key) <= KEY_CHARS_MAX or key.startswith("$"):
            raise InvalidRequest(
                f"{where}: expected keys of 1 to {KEY_CHARS_MAX} characters that do not begin with "
                f"$, found {shorten(key)}",
                where,
            )
        is_text = isinstance(value, str) and len(value) <= VALUE_CHARS_MAX
        is_number = isinstance(value, int | float) and abs(value) <= NUMBER_MAX
        if not is_text and not (is_number and not math.isnan(value)):
            raise InvalidRequest(
                f"{where}.{key}: expected a text of at most {VALUE_CHARS_MAX} characters, a number "
                f"within +-2**53 or a truth value, found {shorten(value)}",
                where,
            )
    return json.dumps(attributes, ensure_ascii=False) if attributes else ""
