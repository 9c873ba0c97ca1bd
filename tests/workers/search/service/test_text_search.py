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
from schemas.log.clock import wall_ms
from schemas.records import Hits, Quoted, RetrievalRequest
from schemas.retrieval import (
    RetrievalResult,
    check_hits,
    merge_hits,
    pack_vector,
    shard_of,
    unpack_vector,
)
from schemas.rules.ranks import depth_of
from tests.workers.search.words.shelves import (
    collections,
    declared,
    document,
    gone,
    passages,
    text,
    vector_of,
)
from tests.workers.search.words.test_index import drawn
from workers.search.engine.engine import EngineSettings, SearchEngine
from workers.search.index.kinds import SearchKind
from workers.search.index.query import SearchAnswer
from workers.search.service import text_search
from workers.search.service.collections import Collections
from workers.search.service.responder import Responder
from workers.search.service.settings import RetrievalSettings, ShardPlace
from workers.search.service.snapshots import store_of
from workers.search.words.terms import query_terms, terms_of
from workers.search.words.texts import passages_of

TEXTS = {name.decode(): each for name, each in drawn(400).items()}


class Pool:
    """A responder for each shard."""

    def __init__(self, shards: int) -> None:
        self.engine = SearchEngine(EngineSettings(lanes=1))
        self.held = [collections() for _ in range(shards)]
        self.shards = [
            Responder(
                self.engine, held, RetrievalSettings(), worker_id="w",
                place=ShardPlace(at, shards),
            )
            for at, held in enumerate(self.held)
        ]  # fmt: skip

    def of(self, name: str) -> Collections:
        return self.held[shard_of(name, len(self.held))]

    def put(self, name: str, *texts: str, offset: int = 1, **fields: Any) -> None:
        held = self.of(name)
        assert held.apply([text(name, offset)]) == []
        assert held.apply_passages([passages(name, *texts, offset=offset, **fields)]) == []

    async def hits(self, query: str, **fields: Any) -> list[Hits]:
        known = {
            "collection": "c", "k": 5, "mode": "hybrid", "wants_passages": True,
            "vector": pack_vector(vector_of(query)), "text": query,
            "deadline_ms": wall_ms() + 60_000, **fields,
        }  # fmt: skip
        request = RetrievalRequest(
            retrieval_id="q", request_id="r", asker_id="a", reply_partition=0, asked_ms=0, **known
        )
        every = [each.hits(request, SearchKind.PREFILL) for each in self.shards]
        found = list(await asyncio.gather(*every))
        for each in found:
            check_hits(each)
        return found

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
        for each in pool.shards:
            each.texts.close()
        await pool.engine.close()


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    async with pool_of(1) as found:
        yield found


def by_cosine(texts: Mapping[str, str], query: str) -> list[str]:
    wanted = vector_of(query)

    def cosine(each: str) -> float:
        vector = vector_of(texts[each])
        return float(vector @ wanted / np.linalg.norm(vector) / np.linalg.norm(wanted))

    return sorted(texts, key=lambda each: (-round(cosine(each), 6), each))


def by_bm25(texts: Mapping[str, str], query: str) -> list[str]:
    counts = {each: Counter(terms_of(words)) for each, words in texts.items()}
    mean = sum(count.total() for count in counts.values()) / len(counts)
    scores: dict[str, float] = {}
    for term in query_terms(query):
        having = [each for each, count in counts.items() if term in count]
        idf = math.log(1 + (len(counts) - len(having) + 0.5) / (len(having) + 0.5))
        for each in having:
            length, tf = 0.25 + 0.75 * counts[each].total() / mean, counts[each][term]
            scores[each] = scores.get(each, 0) + idf * tf * 2.2 / (tf + 1.2 * length)
    return sorted(scores, key=lambda each: (-round(scores[each], 4), each))


def by_ranks(lists: Sequence[Sequence[str]], k: int) -> list[str]:
    scores: dict[str, float] = {}
    for names in lists:
        for rank, each in enumerate(names[: depth_of(k)], 1):
            scores[each] = scores.get(each, 0) + 1 / (60 + rank)
    return sorted(scores, key=lambda each: -scores[each])[:k]


async def test_vector_words_and_both_find_what_exact_computation_finds(pool: Pool) -> None:
    for name, words in TEXTS.items():
        pool.put(name.removesuffix("#0"), words)
    queries = [f"w{at} w{3 * at % 50} w{7 * at % 60}" for at in range(1, 30)]
    right: Counter[str] = Counter()
    for query in queries:
        nearest, best = by_cosine(TEXTS, query), by_bm25(TEXTS, query)
        exact = {"vector": nearest[:5], "words": best[:5], "hybrid": by_ranks((nearest, best), 5)}
        for mode, wanted in exact.items():
            right[mode] += len({*await pool.names(query, mode=mode)} & {*wanted})
    recalls = {mode: found / len(queries) / 5 for mode, found in right.items()}
    assert min(recalls.values()) >= 0.99, recalls


async def test_shards_together_find_what_one_finds_by_vector() -> None:
    """Words differ a little: each shard has statistics of its own."""
    async with pool_of(1) as one, pool_of(3) as three:
        for name, words in TEXTS.items():
            for pool in (one, three):
                pool.put(name.removesuffix("#0"), words)
        shared = 0
        for at in range(20):
            query = f"w{at} w{at + 20}"
            alone = await one.names(query, mode="vector")
            assert await three.names(query, mode="vector") == alone
            shared += len({*await one.names(query)} & {*await three.names(query)})
            found = await three.find(query)
            assert [each.passage_id for each in found.passages] == await three.names(query)
            assert all(TEXTS[each.passage_id] == each.text for each in found.passages)
        assert shared >= 75


async def test_a_passage_is_told_with_all_that_a_citation_needs(pool: Pool) -> None:
    metadata = json.dumps({"title": "Ferries", "path": "docs/ferries.md", "year": 2020})
    pool.put("a", "The Ondry ferry leaves.", "It is pier 7.", metadata=metadata)
    found = (await pool.find("which pier", filter='{"year": 2020}')).passages
    pier = next(each for each in found if "pier" in each.text)
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
async def test_many_scripts(pool: Pool, words: str, query: str) -> None:
    pool.put("a", words)
    pool.put("b", "nothing of that 无关 kein غير 🚢")
    assert await pool.names(query, mode="words") == ["a#0"]
    assert (await pool.find(query, mode="words")).passages[0].text == words


async def test_tenants_cannot_see_each_other_whatever_they_ask(pool: Pool) -> None:
    for tenant in ("", "t1", "t2"):
        pool.put(f"doc{tenant}", f"ferry of {tenant or 'all'}", tenant=tenant)
        own = document(f"vec{tenant}", 1, vector=vector_of("ferry"), tenant=tenant)
        assert pool.of("vec").apply([own]) == []
    everything = {"doc#0", "doct1#0", "doct2#0", "vec", "vect1", "vect2"}
    mine = {"doc#0", "doct1#0", "vec", "vect1"}
    filters = ("", '{"$not": {"x": 1}}', '{"$or": [{"x": {"$nin": [1]}}, {"x": 1}]}')
    theirs = document("x", 1, vector=vector_of("x"), tenant="t2", metadata='{"x": 2}')
    pool.of("doc").apply([theirs])
    for asked in filters:
        for mode in ("hybrid", "vector", "words"):
            fields = {"k": 20, "mode": mode, "filter": asked, "wants_seeds": True}
            (hits,) = await pool.hits("ferry", tenant="t1", **fields)
            seen = {*hits.document_ids, *hits.word_ids, *hits.seeds}
            seen |= {each.passage_id for each in hits.passages}
            assert seen and seen <= mine, (asked, mode)
        (plain,) = await pool.hits("", k=20, tenant="t1", mode="", filter=asked, wants_seeds=True)
        assert {*plain.document_ids, *plain.seeds} <= mine
    assert {*await pool.names("ferry", k=20, tenant="")} >= everything
    assert await pool.names("ferry", k=20, tenant="t3", mode="words") == ["doc#0"]
    (refused,) = await pool.hits("x", tenant="t1", filter='{"$tenant": "t2"}')
    assert refused.error is not None and "t2" not in json.dumps(refused.error.message)[:40]
    (unknown,) = await pool.hits("x", tenant="t1", filter='{"y": 1}')
    assert unknown.error is not None and "$tenant" not in unknown.error.message


async def test_a_declared_collection_is_not_there_for_others(pool: Pool) -> None:
    pool.put("a", "ferry")
    pool.held[0].declare("c", declared(tenants=["t1"]))
    assert await pool.names("ferry", tenant="t1") == await pool.names("ferry") == ["a#0"]
    for mode in ("hybrid", "words", "vector"):
        with pytest.raises(errors.UnknownCollection):
            await pool.find("ferry", tenant="t2", mode=mode)


async def test_what_is_less_similar_is_not_found(pool: Pool) -> None:
    for name, words in list(TEXTS.items())[:60]:
        pool.put(name.removesuffix("#0"), words)
    query = "w1 w2"
    every = {hit.document_id: hit for hit in (await pool.find(query, k=60)).hits}
    scores = sorted(each.score for each in every.values())
    least = scores[len(scores) // 2] - 1e-6  # of float32
    found = (await pool.find(query, k=60, min_score=least)).hits
    assert {hit.document_id for hit in found} == {
        each for each, hit in every.items() if hit.score >= least
    }
    ranks = [hit.fused for hit in found]
    assert ranks == sorted(ranks, reverse=True) and ranks[0] > 1 / 61


async def test_filters_hold_for_words_and_deleted_means_gone(pool: Pool) -> None:
    for at in range(40):
        pool.put(f"d{at}", "the same ferry", metadata=json.dumps({"n": at}))
    few = {"filter": '{"n": {"$gte": 37}}', "mode": "words"}
    assert await pool.names("ferry", **few) == ["d37#0", "d38#0", "d39#0"]
    pool.of("d38").apply([gone("d38", 9)])
    assert await pool.names("ferry", **few) == ["d37#0", "d39#0"]
    pool.put("d39", "no such boat", offset=11, metadata='{"n": 39}')
    assert await pool.names("ferry", **few) == ["d37#0"]


async def test_a_text_without_a_vector_is_searched_by_its_words(pool: Pool) -> None:
    pool.put("a", "ferry at noon")
    for mode in ("hybrid", "vector", "words"):
        (hits,) = await pool.hits("noon", vector=b"", mode=mode, embedded_ms=3.0)
        assert hits.mode == "words" and hits.word_ids == ("a#0",) and hits.document_ids == ()
        assert hits.embedded_ms == 3.0 and hits.cosines == b""
    (hits,) = await pool.hits("noon", mode="hybrid")
    assert len(unpack_vector(hits.cosines)) == 1 and hits.mode == "hybrid"
    assert (await pool.hits("...", mode="words"))[0].word_ids == ()


async def test_what_cannot_be_searched_is_refused(
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


def test_a_tenant_is_told_no_seeds_that_are_not_its_own() -> None:
    """A walk comes by rows of others; its routing list is not for tenants."""
    keys = (np.uint64(1 << 31) << np.uint64(32)) | (np.arange(2, dtype=np.uint64) << np.uint64(1))
    answer = SearchAnswer(
        rows=np.array([0]), distances=np.zeros(1, np.float32), extends=1, computed=2, exact=False,
        top_keys=keys, names=[b"mine#0", "theirs"],
    )  # fmt: skip
    for tenant, seeds in (("", ("mine#0", "theirs")), ("t", ("mine#0",))):
        asked = RetrievalRequest(
            retrieval_id="q", request_id="", asker_id="a", reply_partition=0, collection="c",
            vector=b"", k=1, asked_ms=0, deadline_ms=0, tenant=tenant, wants_seeds=True,
        )  # fmt: skip
        assert text_search.vector_fields(asked, answer)["seeds"] == seeds


async def test_quoted_documents_are_looked_at_with_a_search_without_one_and_where_it_fails() -> (
    None
):
    quoted = tuple(Quoted(document_id=name, content="1") for name in ("a", "b", "x"))
    async with pool_of(2) as pool:
        pool.put("a", "one", content_hash="1")
        pool.put("b", "two", content_hash="2")
        found = await pool.find("one", quoted=quoted)
        assert found.passages[0].content == "1"

        async def told(**fields: Any) -> set[str]:
            found = await pool.hits("one", quoted=quoted, **fields)
            return {name for each in found for name in each.changed}

        assert found.changed == await told() == {"b", "x"}
        check: dict[str, Any] = {"mode": "check", "text": "", "vector": b""}
        assert await told(**check) == {"b", "x"}
        assert [each.error for each in await pool.hits("one", quoted=quoted, **check)] == [None] * 2
        assert await told(filter='{"field": 1}') == {"b", "x"}, "told beside the error, too"
        assert await told(collection="other", **check) == {"a", "b", "x"}
        for held in pool.held:
            held.declare("c", declared(tenants=("t",)))
        assert await told(tenant="u", **check) == {"a", "b", "x"}
        assert await told(tenant="t", **check) == {"b", "x"}
        for each in await pool.hits("one", quoted=quoted * 1_000, **check):
            assert each.error is not None and each.error.code == errors.InvalidRequest.code


async def test_a_text_that_comes_with_its_vector_is_found_by_that_alone(pool: Pool) -> None:
    """As answers are, which stand under the vectors of their questions."""
    held = pool.of("a")
    own = document("a", 1, vector=vector_of("asked"), text="said", metadata='{"until": 9}')
    assert held.apply([own, document("b", 2, vector=vector_of("other"))]) == []
    pool.put("c", "said", offset=3)
    found = await pool.find("asked", mode="vector", k=1, filter='{"until": {"$gt": 8}}')
    ((hit,), passage) = found.hits, found.passages[0]
    assert (hit.document_id, passage.passage_id, passage.document_id) == ("a", "a", "a")
    assert (passage.text, passage.content) == ("said", "")
    assert hit.cosine == pytest.approx(1)
    assert await pool.names("asked", mode="vector", filter='{"until": {"$gt": 9}}') == []
    assert await pool.names("said", mode="words") == ["c#0"]
    held.words("c").compact({each.row_id: each.text for each in passages_of(held.indexes["c"])})
    assert await pool.names("said", mode="words") == ["c#0"]
    assert store_of(held.indexes["c"]).documents == 1
