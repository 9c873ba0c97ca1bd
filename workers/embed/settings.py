"""Section [embedding] of the settings: with what an embedding worker embeds, and how it cuts."""

from typing import Annotated

from pydantic import Field

from schemas.errors import ConfigError
from schemas.sections import Natural, Positive, one_of, section

SERVED, NO_TOKENS = "served", "none"
CHUNK_TOKENS_MAX = 8_192


@section("embedding")
class EmbeddingSettings:
    """Settings that every embedding worker reads."""

    # a model of workers/models/wheels.py, a sentence-transformers folder, or "hash";
    # empty: "hash" beside simulated engines, else all-minilm-l6-v2
    model: str = ""
    name: str = ""  # NAME@VERSION that collections are bound to; empty: told by the model
    # whose token ids stand with each passage: those of [model], or none
    tokenizer: Annotated[str, one_of(SERVED, NO_TOKENS)] = SERVED
    # of a passage at most, by the embedder's own tokenizer
    chunk_tokens: Annotated[int, Field(ge=8, le=CHUNK_TOKENS_MAX)] = 100
    chunk_overlap: Natural = 20  # of these, whole sentences from the end of the passage before
    threads: Positive = 1  # that torch computes with
    batch_tokens: Positive = 1_024  # computed at once; a query waits for one batch of documents
    documents_max: Positive = 128  # taken and not acknowledged; then the log waits
    queries_max: Positive = 4_096  # likewise
    drain_timeout_ms: Natural = 10_000
    close_timeout_ms: Positive = 10_000

    def __post_init__(self) -> None:
        if self.chunk_overlap > self.chunk_tokens // 2:
            raise ConfigError(
                f"embedding.chunk_overlap: expected at most half of embedding.chunk_tokens "
                f"({self.chunk_tokens}), found {self.chunk_overlap}"
            )
