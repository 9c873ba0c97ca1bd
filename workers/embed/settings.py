"""Section [embedding] of the settings: the model of embedding workers, and how they cut texts."""

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
    # empty: "hash" with simulated engines, else all-minilm-l6-v2
    model: str = ""
    name: str = ""  # NAME@VERSION that collections are bound to; empty: the model's own
    # tokenizer of the token ids that are stored with each passage: that of [model], or none
    tokenizer: Annotated[str, one_of(SERVED, NO_TOKENS)] = SERVED
    # most tokens of a passage, by the embedder's own tokenizer
    chunk_tokens: Annotated[int, Field(ge=8, le=CHUNK_TOKENS_MAX)] = 100
    chunk_overlap: Natural = 20  # tokens of whole sentences repeated from the passage before
    threads: Positive = 1  # threads of torch
    batch_tokens: Positive = 1_024  # most tokens of a batch; a query waits for one of documents

    def __post_init__(self) -> None:
        if self.chunk_overlap > self.chunk_tokens // 2:
            raise ConfigError(
                f"embedding.chunk_overlap: expected at most half of embedding.chunk_tokens "
                f"({self.chunk_tokens}), found {self.chunk_overlap}"
            )
