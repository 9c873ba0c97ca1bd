"""Embedding workers on a real broker: documents become passages, searches get vectors."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from schemas.errors import LeaseError
from schemas.records import (
    CollectionDeclared,
    Embedded,
    EmbedRequest,
    MemberState,
    RetrievalRequest,
)
from schemas.rules.sizes import DOCUMENT_CHARS_MAX
from schemas.settings import LogSettings
from schemas.topics import declaration_key
from streams.log.clock import wall_ms
from tests.long_leases import long_leases
from tests.waits import until
from tests.workers.embed.bookshelf import CODEC, Bookshelf, bookshelf, worker
from workers.embed.embedders.hashed import HashEmbedder

pytestmark = pytest.mark.kafka
FERRY = "The ferry leaves from pier seven. It goes every twelve minutes."
FERRY_CUT = ("The ferry leaves from pier seven.", "It goes every twelve minutes.")


@pytest.fixture(autouse=True)
async def calm_members() -> AsyncIterator[None]:
    with long_leases():
        yield


async def test_embedding_worker_keeps_passages_in_step_with_documents(kafka: LogSettings) -> None:
    """Unchanged content is not embedded again, and a tombstone removes the passages."""
    async with bookshelf(kafka) as books, worker(kafka, "e") as running:
        await books.put("ferry", FERRY, metadata='{"title": "Ferries"}')
        await books.shows("ferry", *FERRY_CUT)
        (first,) = (await books.passages()).values()
        assert first.embedder == "hash@1" and first.metadata == '{"title": "Ferries"}'
        assert np.array_equal(
            np.frombuffer(first.chunks[1].vector, "<f4"), HashEmbedder().embed(FERRY_CUT)[1]
        )
        chunk_count = running.totals.chunks
        await books.put("ferry", FERRY, metadata='{"title": "Ferries"}')
        await until(lambda: running.totals.unchanged == 1)
        await books.put("ferry", FERRY, metadata='{"title": "Boats"}', tenant="harbour")
        await until(lambda: running.totals.unchanged == 2)

        async def is_renamed() -> bool:
            return [passages.tenant for passages in (await books.passages()).values()] == [
                "harbour"
            ]

        await until(is_renamed)
        (renamed,) = (await books.passages()).values()
        assert renamed.chunks == first.chunks and renamed.metadata == '{"title": "Boats"}'
        assert renamed.documents_offset == 2 and running.totals.chunks == chunk_count == 2
        await books.put("ferry", "It rests today.")
        await books.shows("ferry", "It rests today.")
        await books.drop("ferry")
        await books.shows("ferry")
        await books.put("bread", "Flour and salt.")
        await books.shows("bread", "Flour and salt.")
        await books.put("bread", vector=b"\0\0\x80?")  # comes with a vector of its own now
        await books.shows("bread")
        await books.put("bread", "Flour and salt.")
        await books.shows("bread", "Flour and salt.")
        await books.put("bread", deleted=True)
        await books.shows("bread")
        assert not await books.dead_letter_reasons("documents")
        await until(lambda: running.batcher.waiting == 0)


async def test_embedding_worker_restores_known_passages_at_start(kafka: LogSettings) -> None:
    async with bookshelf(kafka) as books:
        async with worker(kafka, "one") as first:
            for number in range(20):
                await books.put(f"d{number}", f"Number {number}.")
            await until(lambda: first.totals.documents == 20)
            await books.drop("d3")
            await books.shows("d3")
        async with worker(kafka, "two") as second:
            assert second.totals.documents == 0, "acknowledged ones are not read again"
            for number in range(20):
                await books.put(f"d{number}", f"Number {number}.")
            await until(lambda: second.totals.documents == 20)
            await until(lambda: second.totals.unchanged + second.totals.chunks == 20)
            assert (second.totals.unchanged, second.totals.chunks) == (19, 1)


async def test_embedding_worker_writes_versions_in_order(kafka: LogSettings) -> None:
    async with bookshelf(kafka) as books, worker(kafka, "e"):
        async with asyncio.TaskGroup() as writing:
            for name in ("a", "b", "c"):
                writing.create_task(_write_often(books, name))
        for name in ("a", "b", "c"):
            await books.shows(name, "Version 29. And more.")
        offsets: dict[bytes, int] = {}
        for record in await books.records("passages"):
            passages: Any = CODEC.decode(record.value)
            assert passages.documents_offset > offsets.get(record.key, -1)
            offsets[record.key] = passages.documents_offset


async def _write_often(books: Bookshelf, name: str) -> None:
    """Alternate long and short versions; a short one must not overtake a long one."""
    for version in range(30):
        await books.put(name, f"Version {version}." + " And more." * (version % 2 or 2_000))


async def test_embedding_worker_dead_letters_invalid_records(
    kafka: LogSettings,
) -> None:
    """Oversized, empty and wrong records are reported, and valid ones are processed."""
    async with bookshelf(kafka) as books, worker(kafka, "e"):
        await books.put("long", "a " * (DOCUMENT_CHARS_MAX // 2 + 1))
        await books.put("blank", " \n ")
        await books.put("odd", "A text.", metadata="[]")
        await books.raw(b"rubbish", "books/rubbish")
        await books.raw(None, "books/never-there")
        await books.put("poison", "poison")
        await books.put("good", "All is well.")
        await books.shows("good", "All is well.")

        async def are_buried() -> bool:
            return len(await books.dead_letter_reasons("documents")) == 4

        await until(are_buried)
        reasons = await books.dead_letter_reasons("documents")
        for message in ("divide it", "found only spaces", "a JSON object", "marker"):
            assert any(message in reason for reason in reasons), reasons


async def test_collection_overrides_chunking_and_embedder(
    kafka: LogSettings,
) -> None:
    async with bookshelf(kafka) as books:
        await declare(books, "books", chunk_tokens=40)
        await declare(books, "films", embedder="other@1")
        async with worker(kafka, "e"):
            await books.put("ferry", FERRY)
            await books.shows("ferry", FERRY)
            await books.put("reel", FERRY, collection="films")

            async def is_buried() -> bool:
                return len(await books.dead_letter_reasons("documents")) == 1

            await until(is_buried)
            (reason,) = await books.dead_letter_reasons("documents")
            assert "films: it is bound to the embedder other@1, found hash@1" in reason
            await declare(books, "books", chunk_tokens=12, chunk_overlap=0)

            async def is_cut_anew() -> bool:  # the declaration is read beside the documents
                await books.put("ferry", FERRY)
                return len(await books.texts("ferry")) == 2

            await until(is_cut_anew)


async def declare(books: Bookshelf, collection: str, **fields: Any) -> None:
    declared = CollectionDeclared(collection=collection, at_ms=wall_ms(), **fields)
    await books.send("documents", declared, declaration_key(collection), 0)


def asks(text: str, **fields: Any) -> RetrievalRequest:
    return RetrievalRequest(
        **{
            "retrieval_id": text,
            "request_id": "",
            "asker_id": "a",
            "reply_partition": 0,
            "collection": "books",
            "vector": b"",
            "k": 3,
            "asked_ms": wall_ms(),
            "deadline_ms": wall_ms() + 60_000,
            "text": text,
            "mode": "hybrid",
            **fields,
        }
    )


KINDS = ("prefill", "decode")


async def test_embedding_worker_forwards_searches_with_vectors(
    kafka: LogSettings,
) -> None:
    async with bookshelf(kafka) as books:
        await declare(books, "films", embedder="other@1")
        async with worker(kafka, "e") as running:
            own_vector = HashEmbedder().embed(["given"])[0].tobytes()
            searches = [
                (asks("plain"), 0),
                (asks("probe", urgency="decode"), 1),
                (asks("words", mode="words"), 1),
                (asks("late", deadline_ms=wall_ms() - 1), 0),
                (asks("given", vector=own_vector), 0),
                (asks("films", collection="films"), 1),
            ]
            for request, partition in searches:
                await books.send("embeddings", request, request.retrieval_id, partition)
            for wrong in (asks("far", reply_partition=99), asks("odd", urgency="soon")):
                await books.send("embeddings", wrong, "x", 0)

            async def all_there() -> bool:
                counts = [len(await books.records(f"retrieval.{to}", 2)) for to in KINDS]
                return counts == [5, 1] and len(await books.dead_letter_reasons("embeddings")) == 2

            await until(all_there)
            (probe,) = await books.records("retrieval.decode", 2)
            by_text = {}
            for record in [probe, *await books.records("retrieval.prefill", 2)]:
                request = CODEC.decode(record.value)
                assert isinstance(request, RetrievalRequest)
                assert record.key.decode() == request.text
                by_text[request.text] = (record.partition, request)
            for request, partition in searches:
                text = request.text
                assert by_text[text][0] == partition
                handed = by_text[text][1]
                assert handed.embedded_ms >= 0
                embedded = text in ("plain", "probe", "given")
                assert handed.mode == ("hybrid" if embedded else "words")
                expected_vector = HashEmbedder().embed([text])[0].tobytes() if embedded else b""
                assert handed.vector == expected_vector
                is_made = text in ("plain", "probe")
                assert handed.embedder == (HashEmbedder().name if is_made else "")
            assert running.totals.queries == 2


async def test_embedding_worker_answers_embed_requests(kafka: LogSettings) -> None:
    async with bookshelf(kafka) as books, worker(kafka, "e"):
        call = EmbedRequest(
            embed_id="one",
            asker_id="a",
            reply_partition=1,
            texts=("a b", "c"),
            deadline_ms=wall_ms() + 60_000,
        )
        empty = dataclasses.replace(call, embed_id="none", texts=())
        late = dataclasses.replace(call, embed_id="late", deadline_ms=1)
        ids = dataclasses.replace(call, embed_id="ids", texts=(), token_ids=((5, 6), (7,)))
        foreign = dataclasses.replace(ids, embed_id="foreign", token_ids=((5,), (-1,)))
        for request in (call, empty, late, ids, foreign):
            await books.send("embeddings", request, request.embed_id, 0)

        async def all_there() -> bool:
            return len(await books.records("hits", 2)) == 5

        await until(all_there)
        answers = {}
        for record in await books.records("hits", 2):
            assert record.partition == 1
            answer = CODEC.decode(record.value)
            assert isinstance(answer, Embedded)
            answers[answer.embed_id] = answer
        vectors = np.frombuffer(answers["one"].vectors, "<f4").reshape(2, -1)
        assert np.array_equal(vectors, HashEmbedder().embed(["a b", "c"]))
        assert (answers["one"].tokens, answers["one"].embedder) == (3, "hash@1")
        of_ids = np.frombuffer(answers["ids"].vectors, "<f4").reshape(2, -1)
        assert np.array_equal(of_ids, HashEmbedder().embed([(5, 6), (7,)]))
        assert answers["ids"].tokens == 3
        for name, code in (
            ("none", "invalid_request"),
            ("late", "deadline_exceeded"),
            ("foreign", "invalid_request"),
        ):
            error = answers[name].error
            assert error is not None and error.code == code
        foreign_error = answers["foreign"].error
        assert foreign_error is not None and "input.1: expected token ids" in foreign_error.message


async def test_embedding_worker_publishes_embedder_and_load(kafka: LogSettings) -> None:
    async with bookshelf(kafka) as books, worker(kafka, "e") as running:
        await books.put("ferry", FERRY)
        members = running.membership.view.members

        def has_told() -> bool:
            load, registration = members["e"].embedding, members["e"].registration.embedding
            return bool(
                load
                and registration
                and load.chunks_total == 2
                and registration.embedder == "hash@1"
            )

        await until(has_told)
        assert members["e"].state is MemberState.READY


async def test_embedding_worker_resumes_after_lost_lease(
    kafka: LogSettings,
) -> None:
    async with bookshelf(kafka) as books, worker(kafka, "e") as running:
        former = running.membership
        running._session.tasks.spawn("cut", _lose_lease())
        await until(lambda: running.membership is not former)
        await books.put("ferry", FERRY)
        await books.shows("ferry", *FERRY_CUT)
        assert running.membership.epoch > former.epoch


async def _lose_lease() -> None:
    raise LeaseError("e: fenced")
