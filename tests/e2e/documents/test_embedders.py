"""Two embedding models beside each other in one deployment, each with collections of its own."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.handbook.library import TextDocument, library
from schemas.codec import Codec
from schemas.records import CollectionDeclared
from schemas.settings import LogSettings
from streams.log.clients import LogProducer
from streams.log.clock import wall_ms
from streams.log.documents import declare
from tests.e2e.harness import sim_settings, stack
from tests.waits import PATIENCE_S, until
from workers.embed.settings import EmbeddingPoolSettings, EmbeddingSettings

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]
FERRY = TextDocument("ferry", "The ferry to Ondry leaves pier seven at noon.")
EMBEDDING = EmbeddingSettings(
    model="hash", pools=(EmbeddingPoolSettings(model="hash", name="small@2"),)
)
LISTED_NAMES = {"sim", "sim@books", "sim@films", "hash", "small"}
NAMES = {"hash": "hash@1", "hash@1": "hash@1", "small": "small@2", "small@2": "small@2"}


async def declare_films(log: LogSettings) -> None:
    async with LogProducer(log, Codec(), durable=True, client_id="operator") as producer:
        declared = CollectionDeclared(collection="films", embedder="small@2", at_ms=wall_ms())
        await declare(producer, log, "films", declared)


async def test_embedding_models_serve_beside_each_other(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    kafka = await kafka_with(asker_partitions=6)
    settings = replace(sim_settings(kafka, gateway={"wait_ms": 0}), embedding=EMBEDDING)
    plan: dict[str, Any] = {"replica": 1, "retrieval": 1, "embedding": 1, "embedders": ("small",)}
    async with (
        stack(settings, tmp_path / "home", **plan) as running,
        library(kafka) as shelf,
        httpx.AsyncClient(base_url=running.gateway_urls[0], timeout=PATIENCE_S) as client,
    ):
        await declare_films(kafka)
        for collection in ("films", "books"):
            await shelf.put(collection, [FERRY])
            await shelf.wait_for(collection, FERRY, PATIENCE_S)
        (film,), (book,) = [await shelf.passages(name) for name in ("films", "books")]
        assert (film.embedder, book.embedder) == ("small@2", "hash@1")

        for name, embedder in NAMES.items():
            for path, body in (
                ("/v1/embeddings", {"input": "x"}),
                ("/v1/rerank", {"query": "x", "documents": ["x", "y"]}),
                ("/score", {"text_1": "x", "text_2": "x"}),
            ):
                answer = await client.post(path, json={"model": name, **body})
                assert answer.status_code == 200, (path, name, answer.text)
                assert answer.json()["model"] == embedder
        for name in ("other", "small@1", "sim"):
            answer = await client.post("/v1/embeddings", json={"model": name, "input": "x"})
            assert answer.status_code == 404, answer.text
            assert "'hash', 'small'" in answer.json()["error"]["message"]

        async def lists_all() -> bool:
            models = (await client.get("/v1/models")).json()["data"]
            return {model["id"] for model in models} == LISTED_NAMES

        await until(lists_all)

        async def cites(collection: str) -> bool:
            message = {"role": "user", "content": FERRY.text}
            body = {"model": f"sim@{collection}", "messages": [message], "max_tokens": 4}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["trivium"]["retrieval"]["collection"] == collection
            return bool(answer.json()["choices"][0]["message"].get("annotations"))

        for collection in ("films", "books"):
            await until(partial(cites, collection))

        await running.drain_worker("embedder-0")

        async def is_away() -> bool:
            answer = await client.post("/v1/embeddings", json={"model": "small", "input": "x"})
            assert answer.status_code in (200, 503), answer.text
            return answer.status_code == 503 and answer.headers["retry-after"] == "1"

        await until(is_away)
        answer = await client.post("/v1/embeddings", json={"model": "hash", "input": "x"})
        assert answer.status_code == 200
        assert await cites("films"), "by its words"
