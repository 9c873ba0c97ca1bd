"""Several embedding models: which pool makes the vector of a search or a call."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from schemas.errors import NotReady, UnknownModel
from schemas.records import EmbedRequest, RetrievalRequest
from streams.log.clock import wall_ms
from streams.log.retrieval.client import RetrievalClient
from tests.streams.log.retrieval.pool_stub import Pool, ask_text, asking, hits
from tests.streams.log.retrieval.test_embedding import embedded
from tests.virtual_time import virtual

BOUND = {"films": "small@2", "books": "hash@1", "old": "gone@1"}


class AnswersOfPools:
    """Answers each record at once, and keeps it."""

    def __init__(self) -> None:
        self.records: list[RetrievalRequest | EmbedRequest] = []

    def __call__(self, pool: Pool, _: int, record: RetrievalRequest | EmbedRequest) -> None:
        self.records.append(record)
        if isinstance(record, EmbedRequest):
            embedder = "small@2" if record.embedder == "small" else "hash@1"
            pool.answer(embedded(record, embedder=embedder))
        else:
            pool.answer(hits(record, mode=record.mode))


@asynccontextmanager
async def two_models() -> AsyncIterator[tuple[RetrievalClient, Pool, AnswersOfPools]]:
    pool_answers = AnswersOfPools()
    async with asking(1, pool_answers) as (asker, pool):
        pool.embeds("e")
        pool.embeds("s", embedder="small@2", pool="small")
        pool.holds("w0/1", **BOUND)
        yield asker, pool, pool_answers


@virtual
async def test_search_is_embedded_by_model_of_its_collection() -> None:
    async with two_models() as (asker, pool, pool_answers):
        for collection in ("films", "books", "old", "unknown"):
            result = await ask_text(asker, collection=collection)
            assert (result.mode, result.degraded) == ("hybrid", "")
        assert [record.embedder for record in pool_answers.records] == ["small@2", "", "", ""]
        assert {*pool.topics} == {"embeddings"}


@virtual
async def test_search_is_by_words_while_its_model_is_away() -> None:
    async with two_models() as (asker, pool, pool_answers):
        pool.view.members["s"].seen_ms -= 60_000
        result = await ask_text(asker, collection="films")
        assert result.degraded == "no embedding worker of small@2 is ready"
        (record,) = pool_answers.records
        assert isinstance(record, RetrievalRequest)
        assert (record.mode, record.embedder, pool.topics) == ("words", "", ["retrieval.prefill"])
        assert (await ask_text(asker, collection="books")).degraded == ""
        pool.view.members["e"].seen_ms -= 60_000
        pool.embeds("s", embedder="small@2", pool="small")
        assert (await ask_text(asker, collection="films")).degraded == ""
        result = await ask_text(asker, collection="books")
        assert result.degraded == "no embedding worker is ready"


@virtual
async def test_call_names_model_with_or_without_version() -> None:
    async with two_models() as (asker, pool, pool_answers):
        until_ms = wall_ms() + 1_000
        for name, by in (("", ""), ("hash", ""), ("hash@1", ""), ("small", "small")):
            result = await asker.embed(["a"], deadline_ms=until_ms, embedder=name)
            assert result.embedder == ("small@2" if by else "hash@1")
            assert pool_answers.records.pop().embedder == by
        for name in ("other", "small@1"):
            with pytest.raises(UnknownModel, match=f"one of 'hash', 'small', found '{name}'"):
                await asker.embed(["a"], deadline_ms=until_ms, embedder=name)
        pool.view.members["s"].seen_ms -= 60_000
        with pytest.raises(NotReady, match="no embedding worker of small is ready"):
            await asker.embed(["a"], deadline_ms=until_ms, embedder="small")
        assert not pool_answers.records


@virtual
async def test_silence_of_one_pool_avoids_no_partition_of_another() -> None:
    def half(pool: Pool, partition: int, request: EmbedRequest) -> None:
        if not request.embedder or partition >= 2:
            pool.answer(embedded(request))

    async with asking(1, half) as (asker, pool):
        pool.embeds("e")
        pool.embeds("s", "t", embedder="small@2", pool="small")
        for embedder in ("small", "hash", "hash"):
            await asker.embed(["a"], deadline_ms=wall_ms() + 1_000, embedder=embedder)
        assert pool.asked_partitions == [1, 3, 1, 2]
