"""From documents in words to answers, over a real broker and with a real embedding worker."""

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import ConsumerRecord

from schemas.errors import UnknownCollection
from schemas.records import Chunk, CollectionDeclared
from schemas.settings import LogSettings
from schemas.topics import declaration_key, document_key
from streams.log.clock import wall_ms
from streams.log.retrieval.results import RetrievalResult, embedding_workers
from tests.waits import until
from tests.workers.embed.bookshelf import CODEC, Bookshelf, bookshelf
from tests.workers.embed.bookshelf import worker as embedder
from tests.workers.retrieval.passages.passage_fixtures import record
from tests.workers.retrieval.retrieval_workers import (
    SETTINGS,
    Library,
    calm,
    dead_letter_reasons,
    library,
    ready,
    worker,
)
from workers.embed.embedders.hashed import DIM
from workers.retrieval.worker import RetrievalWorker


@pytest.fixture(autouse=True)
async def _calm() -> AsyncIterator[None]:
    async with calm():
        yield


async def ask(books: Library, text: str, **fields: Any) -> RetrievalResult:
    defaults = {"collection": "books", "deadline_ms": wall_ms() + 60_000, **fields}
    return await books.asker.search_text(text, **defaults)


async def finds(books: Library, query: str, *texts: str, **fields: Any) -> None:
    """Wait until a search finds just these texts, in this order."""

    async def it_does() -> bool:
        try:
            result = await ask(books, query, **fields)
        except UnknownCollection:
            return not texts
        return [passage.text for passage in result.passages] == list(texts)

    await until(it_does)


async def embeds(books: Library) -> None:
    await until(lambda: bool(embedding_workers(books.asker.membership.view, wall_ms())))


def contents(running: RetrievalWorker) -> tuple[dict[bytes | int | str, bytes], int]:
    """Rows with all that lies beside them, less where in the log their document stood; and how many
    have words.
    """
    rows = running.collections.indexes["books"].rows
    words = running.collections.stores["books"].words
    return {row_id: rows.payloads[row][8:] for row_id, row in rows.row_of.items()}, len(words)


async def test_text_search_follows_document_from_upsert_to_deletion(kafka: LogSettings) -> None:
    async with (
        bookshelf(kafka) as shelf,
        library(kafka) as books,
        embedder(kafka, "e"),
        worker(kafka, "r0", "0/2"),
        worker(kafka, "r1", "1/2"),
    ):
        await ready(books, 2)
        await embeds(books)
        await shelf.put("ferry", "The Ondry ferry leaves from pier 7.", metadata='{"title": "F"}')
        await shelf.put("cat", "猫は桟橋で眠る。")
        await shelf.put("hidden", "Pier 9 is secret.", tenant="t1")
        await finds(books, "桟橋", "猫は桟橋で眠る。", mode="words")
        await finds(books, "ferry", "The Ondry ferry leaves from pier 7.", mode="words")
        await finds(books, "secret pier", "Pier 9 is secret.", mode="words", k=1, tenant="t1")
        result = await ask(books, "The Ondry ferry leaves from pier 7.", tenant="t2")
        assert result.mode == "hybrid" and result.degraded == "" and result.is_complete
        assert result.hits[0].document_id == "ferry#0" and result.hits[0].score > 0.99
        assert result.passages[0].title == "F" and result.embedded_ms >= 0
        assert "hidden#0" not in {hit.document_id for hit in result.hits}
        await shelf.put("ferry", "It leaves from pier 8 now.")
        await finds(books, "pier 8", "It leaves from pier 8 now.", mode="words", k=1)
        assert all(
            "pier 7" not in passage.text for passage in (await ask(books, "pier 7")).passages
        )
        await shelf.drop("ferry")
        await finds(books, "leaves", mode="words")
        await books.put({"cat": [1.0, 2.0]}, collection="vectors")
        await declare(
            shelf, CollectionDeclared(collection="books", tenants=["t1"], at_ms=wall_ms())
        )

        async def is_hidden() -> bool:
            try:
                await ask(books, "pier", tenant="t2")
            except UnknownCollection:
                return True
            return False

        await until(is_hidden)
        assert (await ask(books, "pier", tenant="t1")).passages


async def declare(shelf: Bookshelf, declared: CollectionDeclared) -> None:
    await shelf.send("documents", declared, declaration_key(declared.collection), 0)


async def test_edits_across_restarts_equal_fresh_build(kafka: LogSettings, tmp_path: Path) -> None:
    """Edits change texts, vectors and metadata; each restart reads a snapshot and the tail."""
    saving = dataclasses.replace(SETTINGS, snapshot_folder=str(tmp_path))
    generator = random.Random(5)
    words = "pier ferry noon harbour gull rope tide lamp".split()
    async with bookshelf(kafka) as shelf, library(kafka) as books, embedder(kafka, "e"):
        await declare(shelf, CollectionDeclared(collection="books", tenants=["t"], at_ms=wall_ms()))

        async def edit() -> None:
            for _ in range(25):
                name = f"d{generator.randrange(12)}"
                kind = generator.randrange(5)
                if kind == 0:
                    await shelf.drop(name)
                elif kind == 1:
                    await books.put({name: [generator.random() for _ in range(DIM)]})
                else:
                    count = generator.randrange(1, 4)
                    text = ". ".join(" ".join(generator.choices(words, k=6)) for _ in range(count))
                    await shelf.put(name, text, metadata=f'{{"n": {kind}}}')

        async def same_as(fresh: RetrievalWorker, running: RetrievalWorker) -> None:
            async def are_level() -> bool:
                """What is embedded late, and deleted right behind it, moves the ends once more."""
                ends = await _ends(shelf)
                return running._offsets() == ends == fresh._offsets()

            await until(are_level)
            assert contents(running) == contents(fresh)

        for life in range(3):
            async with worker(kafka, "r", settings=saving) as running:
                assert running.collections.declared.allows("books", "t")
                await edit()
                assert running.collections.snapshot_offsets == {}
                async with worker(kafka, f"fresh{life}") as fresh:
                    await edit()
                    await _embedded(shelf)
                    await same_as(fresh, running)
                running._snapshots.save()
                await edit()  # into the tail
                await _embedded(shelf)
        async with worker(kafka, "r", settings=saving) as running, worker(kafka, "new") as fresh:
            await same_as(fresh, running)
            await ready(books, 1)
            assert not running.collections.declared.allows("books", "other")
            result = await ask(books, "ferry noon", mode="words", k=30)
            assert result.passages and all(hit.words for hit in result.hits)


async def _ends(shelf: Bookshelf) -> dict[str, dict[int, int]]:
    ends_by_topic: dict[str, dict[int, int]] = {}
    for topic in ("documents", "passages"):
        records = await shelf.records(topic)
        ends = dict.fromkeys(range(shelf.log.document_partitions), 0)
        ends_by_topic[topic] = ends | {entry.partition: entry.offset + 1 for entry in records}
    return ends_by_topic


async def _embedded(shelf: Bookshelf) -> None:
    """Wait until the passages are those of the documents."""

    async def all_is() -> bool:
        documents, passages_by_key = {}, await shelf.passages()
        for entry in await shelf.records("documents"):
            key = entry.key.decode()
            if not key.startswith("/"):
                documents[key] = entry
        texts = {key for key, entry in documents.items() if entry.value and _is_text(entry)}
        offsets = {key: entry.offset for key, entry in documents.items()}
        return texts == passages_by_key.keys() and all(
            passages_by_key[key].documents_offset == offsets[key] for key in texts
        )

    await until(all_is)


def _is_text(entry: ConsumerRecord) -> bool:
    document: Any = CODEC.decode(entry.value)
    return bool(document.text) and not document.vector


async def test_unusable_passages_become_dead_letters_once(kafka: LogSettings) -> None:
    async with (
        bookshelf(kafka) as shelf,
        library(kafka) as books,
        worker(kafka, "r0"),
        worker(kafka, "r1"),
    ):
        await ready(books, 1)
        for name in ("a", "b", "c", "d", "many"):
            await shelf.put(name, "text", collection="c")
        key = document_key("c", "good")
        await shelf.put("good", "text", collection="c")
        await shelf.send("passages", record("good", "It is good.", offset=9), key)
        await finds(books, "good", "It is good.", mode="words", collection="c")
        wrong = {
            "a": record("a", "x", embedder="other@1"),
            "b": record("b", chunks=(Chunk(text="x", start=0, vector=b"123"),)),
            "c": record("c", chunks=(Chunk(text="x", start=0, vector=bytes(12)),)),
            "d": record("d", chunks=(Chunk(text="x", start=0, vector=b"", tokens=b""),)),
            "many": record("many", chunks=(Chunk(text="", start=0, vector=bytes(4)),) * 5_000),
        }
        for name, passages_record in wrong.items():
            await shelf.send("passages", passages_record, document_key("c", name))
        await shelf.send("passages", wrong["a"], "c/another")
        await shelf.raw(b"no record", "c/x", "passages")
        await shelf.raw(None, "no slash", "passages")

        async def are_all_dead_letters() -> bool:
            return len(await dead_letter_reasons(kafka, "passages")) >= 8

        await until(are_all_dead_letters)
        reasons = await dead_letter_reasons(kafka, "passages")
        assert len(reasons) == len({*reasons}) == 8
        await finds(books, "good", "It is good.", mode="words", collection="c")


async def test_index_keeps_pace_and_reports_backlog(kafka: LogSettings) -> None:
    async with bookshelf(kafka) as shelf, worker(kafka, "r") as running:
        await asyncio.gather(*[shelf.put(f"d{at}", "text", collection="c") for at in range(200)])
        for at in range(200):
            await shelf.send("passages", record(f"d{at}", "x y"), document_key("c", f"d{at}"))
        await until(lambda: len(running.collections.indexes.get("c", ())) == 200)
        await until(lambda: running._load_now().behind == 0)
        (state,) = running.collections.states()
        assert (state.documents, state.passages, state.embedder) == (200, 200, "hash@1")
