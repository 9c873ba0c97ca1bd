"""Vectors of texts from a pool that is a function: parts, order, who is asked again."""

import asyncio
from typing import Any

import numpy as np
import pytest

from schemas.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    NotReady,
    QueueFull,
)
from schemas.records import Embedded, EmbedRequest
from schemas.retrieval import pack_vector
from streams.log.clock import wall_ms
from streams.log.retrieval import embedding as module
from streams.log.retrieval.client import RetrievalClient
from streams.log.retrieval.embedding import EmbeddedTexts
from tests.streams.log.retrieval.pool_stub import Pool, asking
from tests.virtual_time import virtual
from tests.waits import pass_time


def embedded(request: EmbedRequest, **fields: Any) -> Embedded:
    """The vector of a text is its length and its first letter."""
    vectors = [[len(text), ord(text[0])] for text in request.texts]
    defaults = {"embedder": "hash@1", "dim": 2, "vectors": pack_vector(vectors), "at_ms": 0}
    return Embedded(
        embed_id=request.embed_id, tokens=len(request.texts), **{**defaults, **fields}
    )  # fmt: skip


def answers(pool: Pool, _partition: int, request: EmbedRequest) -> None:
    pool.answer(embedded(request))


async def embed(asker: RetrievalClient, *texts: str, within_ms: int = 1_000) -> EmbeddedTexts:
    return await asker.embed(texts, deadline_ms=wall_ms() + within_ms)


@virtual
async def test_embedding_returns_vectors_in_order_across_parts() -> None:
    async with asking(1, answers) as (asker, pool):
        pool.embeds("e")
        texts = ["x" * count for count in range(1, 150)]
        result = await embed(asker, *texts)
        assert result.vectors[:, 0].tolist() == list(range(1, 150)) and result.tokens == 149
        assert result.embedder == "hash@1" and result.vectors.dtype == np.float32
        assert pool.asked_partitions == [1, 2, 3] and pool.topics == ["embeddings"] * 3
        assert asker._embedding._pending == {}
        await embed(asker, "é" * 100_000, "a" * 100_000)
        assert len(pool.asked_partitions) == 5, "each record keeps its size"


@virtual
async def test_embedding_retries_farthest_partition_after_silence() -> None:
    def half(pool: Pool, partition: int, request: EmbedRequest) -> None:
        if partition >= 2:
            pool.answer(embedded(request))

    async with asking(1, half) as (asker, pool):
        pool.embeds("e", "f")
        for _ in range(2):
            assert len((await embed(asker, "a")).vectors) == 1
        assert pool.asked_partitions == [1, 3, 2]


@virtual
async def test_embedding_does_not_resend_to_slow_pool() -> None:
    def slow(pool: Pool, _partition: int, request: EmbedRequest) -> None:
        asyncio.get_running_loop().call_later(0.5, pool.answer, embedded(request))

    async with asking(1, slow) as (asker, pool):
        pool.embeds("e")
        tasks = []
        for _ in range(60):
            tasks.append(asyncio.create_task(embed(asker, "a")))
            await pass_time(0.01)
        await asyncio.gather(*tasks)
        resent_ids = [record_id for record_id in pool.ids if record_id.endswith("-2")]
        assert len(resent_ids) < 15, "only those that were asked before the first answer came"


@virtual
async def test_embedding_raises_errors_and_dead_letters_invalid_answers() -> None:
    def wrong(pool: Pool, _partition: int, request: EmbedRequest) -> None:
        for fields in (
            {"dim": 3}, {"dim": 0}, {"dim": -2}, {"vectors": pack_vector([np.nan, 0])},
            {"vectors": b"12345"},
        ):  # fmt: skip
            pool.answer(embedded(request, **fields))
        full = QueueFull("1 text waits").to_wire()
        pool.answer(embedded(request, error=full, dim=0, vectors=b""))
        pool.answer(embedded(request))

    async with asking(1, wrong) as (asker, pool):
        pool.embeds("e")
        with pytest.raises(QueueFull, match="1 text waits"):
            await embed(asker, "a")
        assert len(pool.buried) == 5


@virtual
async def test_embedding_rejects_vectors_of_several_models() -> None:
    def two(pool: Pool, partition: int, request: EmbedRequest) -> None:
        pool.answer(embedded(request, embedder=f"hash@{partition}"))

    async with asking(1, two) as (asker, pool):
        pool.embeds("e", "f")
        with pytest.raises(EngineFailed, match="several models"):
            await embed(asker, *["a"] * 65)


@virtual
async def test_embedding_rejects_impossible_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asking(1, lambda *_: None) as (asker, pool):
        with pytest.raises(NotReady, match="no embedding worker"):
            await embed(asker, "a")
        pool.embeds("e")
        for texts in ([], ["a"] * 2_049, ["a" * 300_000]):
            with pytest.raises(InvalidRequest, match="expected .*texts"):
                await embed(asker, *texts)
        with pytest.raises(DeadlineExceeded):
            await embed(asker, "a", within_ms=50)
        monkeypatch.setattr(module, "ASKED_MAX", 0)
        with pytest.raises(QueueFull):
            await embed(asker, "a")
        pool.valid = False
        with pytest.raises(BrokerUnavailable):
            await embed(asker, "a")
