"""Section [embedding] of the settings: the models of embedding workers, and how they cut texts.

A table [[embedding.pools]] is one more model, with workers of its own.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from schemas.errors import ConfigError
from schemas.rules.embedders import public_name
from schemas.sections import Natural, Positive, one_of, section, tables_of

SERVED, NO_TOKENS = "served", "none"
CHUNK_TOKENS_MAX = 8_192


POOLS_MAX = 16


@section("embedding.pools")
class EmbeddingPoolSettings:
    """One more embedding model beside the first, and how many workers it has."""

    model: Annotated[str, Field(min_length=1)]  # as in [embedding]
    name: str = ""  # as in [embedding]; calls use it without the version
    workers: Natural = 1  # that `trivium up` starts
    # of its passages; left out: as in [embedding]
    chunk_tokens: Annotated[int, Field(ge=8, le=CHUNK_TOKENS_MAX)] | None = None
    chunk_overlap: Natural | None = None

    @property
    def public_name(self) -> str:
        """Return the name of the model that calls use, and that names the pool."""
        return public_name(self.name) or Path(self.model).expanduser().resolve().name


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
    pools: Annotated[tuple[EmbeddingPoolSettings, ...], tables_of(EmbeddingPoolSettings)] = ()

    def __post_init__(self) -> None:
        if self.chunk_overlap > self.chunk_tokens // 2:
            raise ConfigError(
                f"embedding.chunk_overlap: expected at most half of embedding.chunk_tokens "
                f"({self.chunk_tokens}), found {self.chunk_overlap}"
            )
        names = [pool.public_name for pool in self.pools]
        if len(names) > POOLS_MAX or len({*names}) < len(names) or not all(names):
            raise ConfigError(
                f"embedding.pools: expected at most {POOLS_MAX} different names, found "
                f"{', '.join(map(repr, names))}"
            )
        for pool in self.pools:
            self.of_pool(pool)  # it checks them together

    def alone(self) -> "EmbeddingSettings":
        """Return the settings of the first model's workers."""
        return replace(self, pools=())

    def of_pool(self, pool: EmbeddingPoolSettings) -> "EmbeddingSettings":
        """Return the settings of another model's workers."""
        tokens, overlap = pool.chunk_tokens, pool.chunk_overlap
        return replace(
            self,
            model=pool.model,
            name=pool.name,
            chunk_tokens=self.chunk_tokens if tokens is None else tokens,
            chunk_overlap=self.chunk_overlap if overlap is None else overlap,
            pools=(),
        )
