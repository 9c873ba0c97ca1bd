"""Searches for texts in several shards, beside exact computation; tenants, filters, thresholds."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from schemas import errors
from schemas.records import Hits, Quoted, RetrievalRequest
from schemas.retrieval import check_hits, pack_vector, shard_of, unpack_vector
from schemas.rules.ranks import depth_of
from streams.log.clock import wall_ms
from streams.log.retrieval.results import RetrievalResult, merge_hits
from tests.workers.retrieval.passages.passage_fixtures import (
    collections,
    declared,
    deletion,
    document,
    passages,
    text,
    vector_of,
)
from tests.workers.vector.fulltext.test_index import random_passages
from workers.retrieval import text_search
from workers.retrieval.collections import Collections
from workers.retrieval.passages.texts import passages_of
from workers.retrieval.responder import Responder
from workers.retrieval.settings import RetrievalSettings, ShardPlace
from workers.retrieval.snapshots import store_of
from workers.vector.engine.engine import EngineSettings, SearchEngine
from workers.vector.fulltext.terms import query_terms, terms_of
from workers.vector.index.kinds import SearchKind
from workers.vector.index.query import SearchAnswer

TEXTS = {name.decode(): words for name, words in random_passages(400).items()}


class Pool:
    """A responder for each shard."""

    def __init__(self, shards: int) -> None:
        self.engine = SearchEngine(EngineSettings(lanes=1))
        self.collections = [collections() for _ in range(shards)]
        self.shards = [
            Responder(
                self.engine, shard_collections, RetrievalSettings(), worker_id="w",
                place=ShardPlace(at, shards),
            )
            for at, shard_collections in enumerate(self.collections)
        ]  # fmt: skip

    def of(self, name: str) -> Collections:
        return self.collections[shard_of(name, len(self.collections))]

    def put(self, name: str, *texts: str, offset: int = 1, **fields: Any) -> None:
        shard_collections = self.of(name)
        assert shard_collections.apply([text(name, offset)]) == []
        assert (
            shard_collections.apply_passages([passages(name, *texts, offset=offset, **fields)])
            == []
        )

    async def hits(self, query: str, **fields: Any) -> list[Hits]:
        request_fields = {
            "collection": "c", "k": 5, "mode": "hybrid", "wants_passages": True,
            "vector": pack_vector(vector_of(query)), "text": query,
            "deadline_ms": wall_ms() + 60_000, **fields,
        }  # fmt: skip
        request = RetrievalRequest(
            retrieval_id="q",
            request_id="r",
            asker_id="a",
            reply_partition=0,
            asked_ms=0,
            **request_fields,
        )
        every = [responder.hits(request, SearchKind.PREFILL) for responder in self.shards]
        shard_hits = list(await asyncio.gather(*every))
        for hits in shard_hits:
            check_hits(hits)
        return shard_hits

    async def find(self, query: str, **fields: Any) -> RetrievalResult:
        answers = dict(enumerate(await self.hits(query, **fields)))
        k, quoted = fields.get("k", 5), fields.get("quoted", ())
        return merge_hits("q", answers, len(self.shards), k, by_text=True, quoted=quoted)

    async def names(self, query: str, **fields: Any) -> list[str]:
        return [hit.document_id for hit in (await self.find(query, **fields)).hits]


@asynccontextmanager
async def pool_of(shards: int) -> AsyncIterator[Pool]:
    pool = Pool(shards)
    try:
        yield pool
    finally:
        for responder in pool.shards:
            responder.texts.close()
        await pool.engine.close()


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    async with pool_of(1) as one_shard_pool:
        yield one_shard_pool


def by_cosine(texts: Mapping[str, str], query: str) -> list[str]:
    query_vector = vector_of(query)

    def cosine(name: str) -> float:
        vector = vector_of(texts[name])
        return float(vector @ query_vector / np.linalg.norm(vector) / np.linalg.norm(query_vector))

    return sorted(texts, key=lambda name: (-round(cosine(name), 6), name))


def by_bm25(texts: Mapping[str, str], query: str) -> list[str]:
    counts = {name: Counter(terms_of(words)) for name, words in texts.items()}
    mean = sum(count.total() for count in counts.values()) / len(counts)
    scores: dict[str, float] = {}
    for term in query_terms(query):
        having = [name for name, count in counts.items() if term in count]
        idf = math.log(1 + (len(counts) - len(having) + 0.5) / (len(having) + 0.5))
        for name in having:
            length, tf = 0.25 + 0.75 * counts[name].total() / mean, counts[name][term]
            scores[name] = scores.get(name, 0) + idf * tf * 2.2 / (tf + 1.2 * length)
    return sorted(scores, key=lambda name: (-round(scores[name], 4), name))


def by_ranks(lists: Sequence[Sequence[str]], k: int) -> list[str]:
    scores: dict[str, float] = {}
    for names in lists:
        for rank, name in enumerate(names[: depth_of(k)], 1):
            scores[name] = scores.get(name, 0) + 1 / (60 + rank)
    return sorted(scores, key=lambda name: -scores[name])[:k]


async def test_text_search_modes_match_exact_computation(pool: Pool) -> None:
    for name, words in TEXTS.items():
        pool.put(name.removesuffix("#0"), words)
    queries = [f"w{at} w{3 * at % 50} w{7 * at % 60}" for at in range(1, 30)]
    right: Counter[str] = Counter()
    for query in queries:
        nearest, best = by_cosine(TEXTS, query), by_bm25(TEXTS, query)
        exact = {"vector": nearest[:5], "words": best[:5], "hybrid": by_ranks((nearest, best), 5)}
        for mode, expected in exact.items():
            right[mode] += len({*await pool.names(query, mode=mode)} & {*expected})
    recalls = {mode: count / len(queries) / 5 for mode, count in right.items()}
    assert min(recalls.values()) >= 0.99, recalls


async def test_three_shards_find_same_vectors_as_one() -> None:
    """Words differ a little: each shard has statistics of its own."""
    async with pool_of(1) as one_shard, pool_of(3) as three_shards:
        for name, words in TEXTS.items():
            for pool in (one_shard, three_shards):
                pool.put(name.removesuffix("#0"), words)
        shared = 0
        for at in range(20):
            query = f"w{at} w{at + 20}"
            alone = await one_shard.names(query, mode="vector")
            assert await three_shards.names(query, mode="vector") == alone
            shared += len({*await one_shard.names(query)} & {*await three_shards.names(query)})
            result = await three_shards.find(query)
            assert [passage.passage_id for passage in result.passages] == await three_shards.names(
                query
            )
            assert all(TEXTS[passage.passage_id] == passage.text for passage in result.passages)
        assert shared >= 75


async def test_result_passage_carries_citation_fields(pool: Pool) -> None:
    metadata = json.dumps({"title": "Ferries", "path": "docs/ferries.md", "year": 2020})
    pool.put("a", "The Ondry ferry leaves.", "It is pier 7.", metadata=metadata)
    passages_found = (await pool.find("which pier", filter='{"year": 2020}')).passages
    pier = next(passage for passage in passages_found if "pier" in passage.text)
    assert (pier.passage_id, pier.document_id, pier.start) == ("a#1", "a", 10)
    assert (pier.title, pier.source) == ("Ferries", "docs/ferries.md")
    assert np.frombuffer(pier.tokens, "<i4").tolist() == list(range(len(pier.text)))
    vector = vector_of("It is pier 7.")
    exact = (await pool.find("It is pier 7.", vector=pack_vector(vector))).hits[0]
    assert exact.document_id == "a#1" and exact.score == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("words", "query"),
    [
        ("渡轮从7号码头出发", "码头在哪里"),
        ("Die Fähre fährt vom Straßenkai", "STRASSENKAI"),
        ("تغادر العبارة من الرصيف", "الرَّصيف"),
        ("Party 🎉 am Kai", "🎉"),
        ("船は港を出る", "港"),
    ],
)
async def test_word_search_finds_many_scripts(pool: Pool, words: str, query: str) -> None:
    pool.put("a", words)
    pool.put("b", "nothing of that 无关 kein غير 🚢")
    assert await pool.names(query, mode="words") == ["a#0"]
    assert (await pool.find(query, mode="words")).passages[0].text == words


async def test_tenant_sees_no_documents_of_other_tenants(pool: Pool) -> None:
    for tenant in ("", "t1", "t2"):
        pool.put(f"doc{tenant}", f"ferry of {tenant or 'all'}", tenant=tenant)
        vector_document = document(f"vec{tenant}", 1, vector=vector_of("ferry"), tenant=tenant)
        assert pool.of("vec").apply([vector_document]) == []
    everything = {"doc#0", "doct1#0", "doct2#0", "vec", "vect1", "vect2"}
    visible_ids = {"doc#0", "doct1#0", "vec", "vect1"}
    filters = ("", '{"$not": {"x": 1}}', '{"$or": [{"x": {"$nin": [1]}}, {"x": 1}]}')
    foreign_document = document("x", 1, vector=vector_of("x"), tenant="t2", metadata='{"x": 2}')
    pool.of("doc").apply([foreign_document])
    for filter_json in filters:
        for mode in ("hybrid", "vector", "words"):
            fields = {"k": 20, "mode": mode, "filter": filter_json, "wants_seeds": True}
            (hits,) = await pool.hits("ferry", tenant="t1", **fields)
            returned_ids = {*hits.document_ids, *hits.word_ids, *hits.seeds}
            returned_ids |= {passage.passage_id for passage in hits.passages}
            assert returned_ids and returned_ids <= visible_ids, (filter_json, mode)
        (plain,) = await pool.hits(
            "", k=20, tenant="t1", mode="", filter=filter_json, wants_seeds=True
        )
        assert {*plain.document_ids, *plain.seeds} <= visible_ids
    assert {*await pool.names("ferry", k=20, tenant="")} >= everything
    assert await pool.names("ferry", k=20, tenant="t3", mode="words") == ["doc#0"]
    (refused,) = await pool.hits("x", tenant="t1", filter='{"$tenant": "t2"}')
    assert refused.error is not None and "t2" not in json.dumps(refused.error.message)[:40]
    (unknown,) = await pool.hits("x", tenant="t1", filter='{"y": 1}')
    assert unknown.error is not None and "$tenant" not in unknown.error.message


async def test_declared_collection_is_hidden_from_other_tenants(pool: Pool) -> None:
    pool.put("a", "ferry")
    pool.collections[0].declare("c", declared(tenants=["t1"]))
    assert await pool.names("ferry", tenant="t1") == await pool.names("ferry") == ["a#0"]
    for mode in ("hybrid", "words", "vector"):
        with pytest.raises(errors.UnknownCollection):
            await pool.find("ferry", tenant="t2", mode=mode)


async def test_min_score_excludes_less_similar_hits(pool: Pool) -> None:
    for name, words in list(TEXTS.items())[:60]:
        pool.put(name.removesuffix("#0"), words)
    query = "w1 w2"
    every = {hit.document_id: hit for hit in (await pool.find(query, k=60)).hits}
    scores = sorted(hit.score for hit in every.values())
    min_score = scores[len(scores) // 2] - 1e-6  # of float32
    hits = (await pool.find(query, k=60, min_score=min_score)).hits
    assert {hit.document_id for hit in hits} == {
        name for name, hit in every.items() if hit.score >= min_score
    }
    ranks = [hit.fused for hit in hits]
    assert ranks == sorted(ranks, reverse=True) and ranks[0] > 1 / 61


async def test_word_search_obeys_filters_and_deletions(pool: Pool) -> None:
    for at in range(40):
        pool.put(f"d{at}", "the same ferry", metadata=json.dumps({"n": at}))
    few = {"filter": '{"n": {"$gte": 37}}', "mode": "words"}
    assert await pool.names("ferry", **few) == ["d37#0", "d38#0", "d39#0"]
    pool.of("d38").apply([deletion("d38", 9)])
    assert await pool.names("ferry", **few) == ["d37#0", "d39#0"]
    pool.put("d39", "no such boat", offset=11, metadata='{"n": 39}')
    assert await pool.names("ferry", **few) == ["d37#0"]


async def test_text_without_vector_is_searched_by_words(pool: Pool) -> None:
    pool.put("a", "ferry at noon")
    for mode in ("hybrid", "vector", "words"):
        (hits,) = await pool.hits("noon", vector=b"", mode=mode, embedded_ms=3.0)
        assert hits.mode == "words" and hits.word_ids == ("a#0",) and hits.document_ids == ()
        assert hits.embedded_ms == 3.0 and hits.cosines == b""
    (hits,) = await pool.hits("noon", mode="hybrid")
    assert len(unpack_vector(hits.cosines)) == 1 and hits.mode == "hybrid"
    assert (await pool.hits("...", mode="words"))[0].word_ids == ()


async def test_text_search_rejects_wrong_requests(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.put("a", "ferry")
    for fields, error in (
        ({"mode": "all"}, errors.InvalidRequest),
        ({"k": 0, "mode": "words"}, errors.InvalidRequest),
        ({"k": 10_000}, errors.InvalidRequest),
        ({"embedder": "other@1"}, errors.InvalidVector),
        ({"vector": pack_vector([1.0])}, errors.WrongDimension),
        ({"filter": "no"}, errors.InvalidRequest),
        ({"collection": "d"}, errors.UnknownCollection),
    ):
        with pytest.raises(error):
            await pool.find("ferry", **fields)
    pool.shards[0].texts._waiting_max = 0
    with pytest.raises(errors.QueueFull):
        await pool.find("ferry")
    pool.shards[0].texts._waiting_max = 9
    monkeypatch.setattr(text_search, "_PASSAGE_BYTES_MAX", 10)
    assert (await pool.find("ferry")).passages == (), "what does not fit is left out"


def test_tenant_gets_no_seeds_of_other_documents() -> None:
    """A walk passes rows of other tenants; its routing list is not for tenants."""
    keys = (np.uint64(1 << 31) << np.uint64(32)) | (np.arange(2, dtype=np.uint64) << np.uint64(1))
    answer = SearchAnswer(
        rows=np.array([0]), distances=np.zeros(1, np.float32), extends=1, computed=2, exact=False,
        top_keys=keys, names=[b"mine#0", "theirs"],
    )  # fmt: skip
    for tenant, seeds in (("", ("mine#0", "theirs")), ("t", ("mine#0",))):
        request = RetrievalRequest(
            retrieval_id="q", request_id="", asker_id="a", reply_partition=0, collection="c",
            vector=b"", k=1, asked_ms=0, deadline_ms=0, tenant=tenant, wants_seeds=True,
        )  # fmt: skip
        assert text_search.vector_fields(request, answer)["seeds"] == seeds


async def test_quotes_are_checked_with_search_alone_and_after_errors() -> None:
    quoted = tuple(Quoted(document_id=name, content="1") for name in ("a", "b", "x"))
    async with pool_of(2) as pool:
        pool.put("a", "one", content_hash="1")
        pool.put("b", "two", content_hash="2")
        result = await pool.find("one", quoted=quoted)
        assert result.passages[0].content == "1"

        async def changed_names(**fields: Any) -> set[str]:
            shard_hits = await pool.hits("one", quoted=quoted, **fields)
            return {name for hits in shard_hits for name in hits.changed}

        assert result.changed == await changed_names() == {"b", "x"}
        check: dict[str, Any] = {"mode": "check", "text": "", "vector": b""}
        assert await changed_names(**check) == {"b", "x"}
        assert [hits.error for hits in await pool.hits("one", quoted=quoted, **check)] == [None] * 2
        assert await changed_names(filter='{"field": 1}') == {"b", "x"}, (
            "told beside the error, too"
        )
        assert await changed_names(collection="other", **check) == {"a", "b", "x"}
        for shard_collections in pool.collections:
            shard_collections.declare("c", declared(tenants=("t",)))
        assert await changed_names(tenant="u", **check) == {"a", "b", "x"}
        assert await changed_names(tenant="t", **check) == {"b", "x"}
        for hits in await pool.hits("one", quoted=quoted * 1_000, **check):
            assert hits.error is not None and hits.error.code == errors.InvalidRequest.code


async def test_text_with_own_vector_is_found_by_vector_only(pool: Pool) -> None:
    """Answers of the response cache stand under the vectors of their questions like this."""
    shard_collections = pool.of("a")
    answer_document = document(
        "a", 1, vector=vector_of("asked"), text="said", metadata='{"until": 9}'
    )
    assert (
        shard_collections.apply([answer_document, document("b", 2, vector=vector_of("other"))])
        == []
    )
    pool.put("c", "said", offset=3)
    result = await pool.find("asked", mode="vector", k=1, filter='{"until": {"$gt": 8}}')
    ((hit,), passage) = result.hits, result.passages[0]
    assert (hit.document_id, passage.passage_id, passage.document_id) == ("a", "a", "a")
    assert (passage.text, passage.content) == ("said", "")
    assert hit.cosine == pytest.approx(1)
    assert await pool.names("asked", mode="vector", filter='{"until": {"$gt": 9}}') == []
    assert await pool.names("said", mode="words") == ["c#0"]
    shard_collections.words("c").compact(
        {passage.row_id: passage.text for passage in passages_of(shard_collections.indexes["c"])}
    )
    assert await pool.names("said", mode="words") == ["c#0"]
    assert store_of(shard_collections.indexes["c"]).documents == 1
