"""Two embedding models beside each other: each text is processed by the pool of its collection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from schemas.errors import ConfigError
from schemas.records import DocumentPassages, Embedded, EmbedRequest, RetrievalRequest
from schemas.retrieval import Vector
from schemas.settings import LogSettings
from schemas.topics import document_key
from streams.log.clock import wall_ms
from tests.long_leases import long_leases
from tests.member_readiness import is_seen_ready
from tests.waits import until
from tests.workers.embed.bookshelf import CODEC, SETTINGS, Bookshelf, bookshelf
from tests.workers.embed.test_worker import FERRY, asks, declare
from workers.embed.embedders.hashed import HashEmbedder
from workers.embed.pools import EmbeddingPool, pool_of
from workers.embed.settings import EmbeddingPoolSettings, EmbeddingSettings
from workers.embed.worker import EmbeddingWorker

FIRST = EmbeddingPool(other_names=frozenset({"small"}))
SMALL = EmbeddingPool(name="small")


class SmallEmbedder(HashEmbedder):
    """Another model, with vectors of 8 values."""

    name = "small@2"
    dim = 8

    def embed(self, texts: Any) -> Vector:
        rows = super().embed(texts)[:, : self.dim] + 1.0
        return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


def test_pool_handles_own_model_and_first_pool_all_others() -> None:
    for embedder, is_small in (("small@2", True), ("small", True), ("small@1", True)):
        assert (SMALL.handles(embedder), FIRST.handles(embedder)) == (is_small, not is_small)
    for embedder in ("", "hash@1", "gone@1", "smaller@1"):
        assert FIRST.handles(embedder) and not SMALL.handles(embedder)
    assert EmbeddingPool().handles("small@2") and EmbeddingPool().is_alone


def test_pools_of_settings_have_names_of_their_models() -> None:
    settings = EmbeddingSettings(
        model="hash",
        chunk_tokens=50,
        pools=(
            EmbeddingPoolSettings(model="models/small-v2"),
            EmbeddingPoolSettings(model="hash", name="law@3", chunk_tokens=16, chunk_overlap=0),
        ),
    )
    its_settings, pool = pool_of(settings, "")
    assert (its_settings.model, its_settings.pools) == ("hash", ()) and pool.other_names == {
        "small-v2",
        "law",
    }
    its_settings, pool = pool_of(settings, "law")
    assert (
        its_settings.model,
        its_settings.name,
        its_settings.chunk_tokens,
        its_settings.chunk_overlap,
    ) == ("hash", "law@3", 16, 0)
    assert pool.name == "law" and pool.other_names == {"small-v2"}
    assert pool_of(settings, "small-v2")[0].chunk_tokens == 50
    with pytest.raises(ConfigError, match="expected small-v2, law, found 'hash'"):
        pool_of(settings, "hash")
    pool.check_embedder("law@3")
    for embedder in ("small-v2@1", "hash@1"):
        with pytest.raises(ConfigError, match="expected different models"):
            pool.check_embedder(embedder)


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ([{"model": ""}], "model"),
        ([{}], "model"),
        ([{"model": "a", "workers": -1}], "workers"),
        ([{"model": "a"}, {"model": "b", "name": "a@2"}], "different names"),
        ([{"model": f"m{i}"} for i in range(17)], "at most 16"),
        ([{"model": "a", "chunk_tokens": 10, "chunk_overlap": 9}], "at most half"),
        ([{"model": "a", "pools": []}], "pools"),
        ("a", "pools"),
    ],
)
def test_wrong_pools_are_refused(tables: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EmbeddingSettings(pools=tables)


@asynccontextmanager
async def pools(log: LogSettings) -> AsyncIterator[dict[str, EmbeddingWorker]]:
    """Run a worker of each pool."""
    stop = asyncio.Event()
    workers = {
        "first": EmbeddingWorker(log, SETTINGS, HashEmbedder(), "first", CODEC, pool=FIRST),
        "small": EmbeddingWorker(log, SETTINGS, SmallEmbedder(), "small", CODEC, pool=SMALL),
    }
    lives = [asyncio.create_task(worker.run(stop)) for worker in workers.values()]
    try:
        with long_leases():
            await until(lambda: all(is_seen_ready(w.membership) for w in workers.values()))
            yield workers
    finally:
        stop.set()
        await asyncio.gather(*lives)


async def _passages(books: Bookshelf) -> dict[str, DocumentPassages]:
    return {key: value for key, value in (await books.passages()).items() if value.chunks}


@pytest.mark.kafka
async def test_documents_are_embedded_by_pool_of_their_collection(kafka: LogSettings) -> None:
    """Each once, by one of the pools; a document that follows its declaration at once, too."""
    async with bookshelf(kafka) as books, pools(kafka) as workers:
        for number in range(8):
            await declare(books, f"s{number}", embedder="small@2")
            await books.put("ferry", FERRY, collection=f"s{number}")
            await books.put("ferry", FERRY, collection=f"f{number}")
        await until(lambda: sum(w.totals.documents for w in workers.values()) == 16)

        async def are_there() -> bool:
            return len(await _passages(books)) == 16

        await until(are_there)
        for key, passages in (await _passages(books)).items():
            is_small = key.startswith("s")
            assert passages.embedder == ("small@2" if is_small else "hash@1"), key
            assert len(passages.chunks[0].vector) == 4 * (8 if is_small else HashEmbedder.dim)
        assert [worker.totals.documents for worker in workers.values()] == [8, 8]
        for number in range(8):
            await books.drop("ferry", f"s{number}")

        async def are_gone() -> bool:
            return len(await _passages(books)) == 8

        await until(are_gone)
        tombstones = [r for r in await books.records("passages") if not r.value]
        assert len(tombstones) == 8, "of one pool alone"
        assert not await books.dead_letter_reasons("documents")


@pytest.mark.kafka
async def test_document_before_its_declaration_is_never_lost(kafka: LogSettings) -> None:
    """A pool that is not yet bound leaves it; the first one buries what it may not embed."""
    async with bookshelf(kafka) as books:
        await books.put("early", FERRY, collection="films")
        await declare(books, "films", embedder="small@2")
        async with pools(kafka):
            await books.put("late", FERRY, collection="films")

            async def are_told() -> bool:
                keys = {document_key("films", name) for name in ("early", "late")}
                return (await _passages(books)).keys() >= keys

            await until(are_told)
            reasons = await books.dead_letter_reasons("documents")
            assert all("bound to the embedder small@2, found hash@1" in r for r in reasons)


@pytest.mark.kafka
async def test_searches_and_calls_are_embedded_by_named_pool(kafka: LogSettings) -> None:
    async with bookshelf(kafka) as books, pools(kafka) as workers:
        await declare(books, "films", embedder="small@2")
        await books.put("reel", FERRY, collection="films")

        async def is_declared() -> bool:
            ours = {name: w._declarations.is_ours("films") for name, w in workers.items()}
            members = [w.membership.view.members for w in workers.values()]
            return (
                ours == {"first": False, "small": True}
                and all({"first", "small"} <= members_seen.keys() for members_seen in members)
                and bool(await _passages(books))
            )

        await until(is_declared)
        searches = {
            "plain": ("books", "", "hash@1"),
            "bound": ("films", "", "small@2"),
            "named": ("films", "small@2", "small@2"),
            "other": ("books", "small", "small@2"),
            "gone": ("books", "gone@1", "hash@1"),
        }
        for text, (collection, embedder, _) in searches.items():
            request = asks(text, collection=collection, embedder=embedder)
            await books.send("embeddings", request, text, 0)
        call = EmbedRequest(
            embed_id="",
            asker_id="a",
            reply_partition=1,
            texts=("a b",),
            deadline_ms=wall_ms() + 60_000,
        )
        for embedder in ("", "hash", "hash@1", "small", "small@2"):
            record = replace(call, embed_id=embedder or "none", embedder=embedder)
            await books.send("embeddings", record, record.embed_id, 1)

        async def all_there() -> bool:
            forwarded = await books.records("retrieval.prefill", 2)
            return len(forwarded) == len(searches) and len(await books.records("hits", 2)) == 5

        await until(all_there)
        for record in await books.records("retrieval.prefill", 2):
            search = CODEC.decode(record.value)
            assert isinstance(search, RetrievalRequest)
            assert search.embedder == searches[search.text][2]
            dim = 8 if search.embedder == "small@2" else HashEmbedder.dim
            assert len(search.vector) == 4 * dim
        for record in await books.records("hits", 2):
            answer = CODEC.decode(record.value)
            assert isinstance(answer, Embedded) and answer.error is None
            is_small = answer.embed_id.startswith("small")
            assert answer.embedder == ("small@2" if is_small else "hash@1")
