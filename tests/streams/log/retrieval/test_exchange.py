"""Texts on their way to the shards: by the embedding pool, past it, and what comes back."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.errors import BrokerUnavailable, DeadlineExceeded, InvalidRequest
from schemas.records import Hits, Passage, Quoted, RetrievalRequest
from schemas.retrieval import pack_vector
from streams.log.clock import wall_ms
from tests.streams.log.retrieval.pool_stub import Pool, ask, ask_text, asking, hits
from tests.virtual_time import virtual


def both(request: RetrievalRequest, shard: int = 0, shards: int = 1, **fields: Any) -> Hits:
    """Return a shard's answer: "a" is near and has the words, "b" is near, "c" has the words."""
    if request.mode == "words":
        answer = hits(request, shard, shards=shards, found={}, mode="words")
        return replace(answer, word_ids=("c", "a"), word_scores=pack_vector([3, 1]))
    answer = hits(request, shard, shards=shards, found={"a": 0.25, "b": 0.5}, mode=request.mode)
    fields = {
        "cosines": pack_vector([0.75, 0.5]), "word_cosines": pack_vector([0.125, 0.75]),
        "word_ids": ("c", "a"), "word_scores": pack_vector([3, 1]), "embedded_ms": 4.0,
        "passages": [Passage(passage_id=name, document_id=name, text=name) for name in "abc"],
        **fields,
    }  # fmt: skip
    return replace(answer, **fields)


def answers(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
    pool.answer(both(request))


@virtual
async def test_text_search_goes_through_embedding_pool_and_fuses_lists() -> None:
    async with asking(1, answers) as (asker, pool):
        pool.embeds("e")
        result = await ask_text(asker, k=3)
        assert pool.topics == ["embeddings"]
        assert [hit.document_id for hit in result.hits] == ["a", "c", "b"]
        assert (
            [hit.score for hit in result.hits]
            == [0.75, 0.125, 0.5]
            == [passage.score for passage in result.passages]
        )
        assert result.hits[0].fused == 1 / 61 + 1 / 62 and result.hits[0].words == 1.0
        assert result.hits[1].distance == float("inf") and result.hits[2].words is None
        assert (result.mode, result.degraded, result.embedded_ms) == ("hybrid", "", 4.0)
        assert len((await ask_text(asker, k=1)).hits) == 1


@virtual
async def test_text_search_ranks_across_all_shards() -> None:
    def shards(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        pool.answer(both(request, 0, 2))
        second_fields = {
            "document_ids": ("x",), "distances": pack_vector([0.3]), "cosines": pack_vector([0.7]),
            "word_ids": ("y", "x"), "word_scores": pack_vector([2, 0.5]),
            "word_cosines": pack_vector([0, 0.7]),
        }  # fmt: skip
        pool.answer(both(request, 1, 2, **second_fields))

    async with asking(2, shards) as (asker, pool):
        pool.embeds("e")
        result = await ask_text(asker, k=5)
        assert {hit.document_id: hit.fused for hit in result.hits} == {
            "a": 1 / 61 + 1 / 63, "x": 1 / 62 + 1 / 64, "c": 1 / 61, "y": 1 / 62, "b": 1 / 63
        }  # fmt: skip


@virtual
async def test_word_search_needs_no_embedding_worker() -> None:
    async with asking(1, answers) as (asker, pool):
        result = await ask_text(asker, mode="words", kind="decode")
        assert pool.topics == ["retrieval.decode"] and result.degraded == ""
        assert [(hit.document_id, hit.score, hit.cosine) for hit in result.hits] == [
            ("c", 1 / 61, None), ("a", 1 / 62, None)
        ]  # fmt: skip
        for mode in ("hybrid", "vector"):
            result = await ask_text(asker, mode=mode)
            assert pool.topics[-1] == "retrieval.prefill"
            assert result.mode == "words" and result.degraded == "no embedding worker is ready"
            assert result.passages == ()


@virtual
async def test_text_search_reports_missing_vector_as_degraded() -> None:
    def failing(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        pool.answer(both(replace(request, mode="words")))

    async with asking(1, failing) as (asker, pool):
        pool.embeds("e")
        result = await ask_text(asker)
        assert result.mode == "words" and "no vector" in result.degraded


@virtual
async def test_text_search_bypasses_only_embedding_worker_when_silent() -> None:
    def silent(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        if pool.topics[-1] != "embeddings":
            pool.answer(both(request))

    async with asking(1, silent) as (asker, pool):
        pool.embeds("e")
        result = await ask_text(asker)
        assert pool.topics == ["embeddings", "retrieval.prefill"] and pool.asked_partitions == [
            1,
            3,
        ]
        assert result.mode == "words" and result.degraded
        assert (await ask(asker)).mode == "" and pool.asked_partitions[-1] == 1, (
            "shards are not silent there"
        )


@virtual
async def test_text_search_asks_second_embedding_worker_when_first_is_silent() -> None:
    def half(pool: Pool, partition: int, request: RetrievalRequest) -> None:
        if partition >= 2:
            pool.answer(both(request))

    async with asking(1, half) as (asker, pool):
        pool.embeds("e", "f")
        result = await ask_text(asker)
        assert result.mode == "hybrid" and pool.topics == ["embeddings"] * 2
        assert pool.asked_partitions == [1, 3]
        await ask_text(asker)
        assert pool.asked_partitions == [1, 3, 2], "the silent one is avoided"


@virtual
async def test_silent_shard_does_not_count_as_silent_embedding_worker() -> None:
    def half(pool: Pool, partition: int, request: RetrievalRequest) -> None:
        pool.answer(both(request, 0, 2))
        if partition >= 2:
            pool.answer(both(request, 1, 2, document_ids=(), distances=b"", cosines=b""))

    async with asking(2, half) as (asker, pool):
        pool.embeds("e")
        assert (await ask_text(asker)).mode == "hybrid"
        assert pool.topics == ["embeddings"] * 2 and pool.asked_partitions == [1, 3]


@virtual
async def test_text_search_rejects_invalid_query() -> None:
    async with asking(1, lambda *_: None) as (asker, pool):
        with pytest.raises(InvalidRequest, match="expected hybrid, vector, words, found 'all'"):
            await ask_text(asker, mode="all")
        with pytest.raises(InvalidRequest, match="expected a text"):
            await asker.search_text(" \n", collection="c", deadline_ms=1)
        with pytest.raises(DeadlineExceeded):
            await ask_text(asker, within_ms=50)
        pool.valid = False
        with pytest.raises(BrokerUnavailable):
            await ask_text(asker)


QUOTED = [Quoted(document_id="d", content="1"), Quoted(document_id="e", content="2")]


@virtual
async def test_client_checks_quoted_documents_with_or_without_search() -> None:
    """A check alone goes to the shards directly and searches for nothing."""

    def shard(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        assert request.quoted == tuple(QUOTED)
        answer = both(request) if request.text else hits(request, found={}, mode=request.mode)
        pool.answer(replace(answer, changed=("e",)))

    async with asking(1, shard) as (asker, pool):
        pool.embeds("e")
        assert (await ask_text(asker, quoted=QUOTED)).changed == {"e"}
        place: dict[str, Any] = {"collection": "c", "deadline_ms": wall_ms() + 1_000}
        assert await asker.check(QUOTED, **place) == {"e"}
        assert pool.topics == ["embeddings", "retrieval.prefill"]
        assert await asker.check([], **place) == set() and len(pool.topics) == 2
        with pytest.raises(InvalidRequest, match="at most 1024 quoted, found 2000"):
            await asker.check(QUOTED * 1_000, **place)


@virtual
async def test_check_fails_when_no_shard_answers() -> None:
    async with asking(2, lambda *_: None) as (asker, _):
        with pytest.raises(DeadlineExceeded):
            await asker.check(QUOTED, collection="c", deadline_ms=wall_ms() + 50)
