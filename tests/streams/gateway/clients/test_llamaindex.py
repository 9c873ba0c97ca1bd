"""LlamaIndex's own packages, unchanged, over a real socket."""

import asyncio
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.streams.gateway.endpoints.test_vector_stores import file_of, hit, new_store, send
from tests.streams.gateway.in_process import InProcessGateway, found_hits, serving
from tests.streams.gateway.samples import MODEL
from tests.waits import PATIENCE_S

WHY = "needs LlamaIndex: `make build/stamps/llamaindex`"
llm = pytest.importorskip("llama_index.llms.openai_like", reason=WHY)
embedding = pytest.importorskip("llama_index.embeddings.openai_like", reason=WHY)
retrievers = pytest.importorskip("llama_index.core.retrievers", reason=WHY)
schema = pytest.importorskip("llama_index.core.schema", reason=WHY)
engines = pytest.importorskip("llama_index.core.query_engine", reason=WHY)


def talking() -> InProcessGateway:
    gateway = InProcessGateway(api_keys=("one", "two"), max_model_len=4_096)
    gateway.answer_with("Pier", " 7")
    return gateway


def chat_model(url: str, http: httpx.Client) -> Any:
    return llm.OpenAILike(
        model=MODEL,
        api_base=url + "/v1",
        api_key="one",
        is_chat_model=True,
        context_window=4_096,
        max_tokens=16,
        http_client=http,
        max_retries=0,
    )


async def test_llamaindex_client_completes_and_streams() -> None:
    async with serving(talking()) as url:

        def talk() -> tuple[str, str]:
            with httpx.Client(timeout=PATIENCE_S) as http:
                model = chat_model(url, http)
                parts = model.stream_complete("Where?")
                return model.complete("Where?").text, "".join(part.delta or "" for part in parts)

        assert await asyncio.to_thread(talk) == ("Pier 7", "Pier 7")


async def test_llamaindex_client_embeds_texts() -> None:
    async with serving(talking()) as url:

        def embed() -> list[list[float]]:
            with httpx.Client(timeout=PATIENCE_S) as http:
                model = embedding.OpenAILikeEmbedding(
                    model_name="letters", api_base=url + "/v1", api_key="one", http_client=http
                )
                vectors: list[list[float]] = model.get_text_embedding_batch(["aa", "bb"])
            return vectors

        vectors = await asyncio.to_thread(embed)
        assert [int(np.argmax(vector)) for vector in vectors] == [0, 1]


async def test_llamaindex_client_answers_from_vector_store() -> None:
    """Its query engine has a retriever over `/v1/vector_stores/{id}/search`."""
    gateway = talking()
    store, file_id = await new_store(gateway), await file_of(gateway)
    await send(gateway, store + "/files", {"file_id": file_id})
    gateway.pool.search_results = [
        found_hits(hit(file_id, "The ferry leaves from pier 7.", 0.5, 0.03))
    ]
    async with serving(gateway) as url:

        class StoreRetriever(retrievers.BaseRetriever):  # type: ignore[misc, name-defined]  # may not be there
            def _retrieve(self, query: Any) -> list[Any]:
                with openai.OpenAI(
                    base_url=url + "/v1", api_key="one", timeout=PATIENCE_S
                ) as client:
                    page = client.vector_stores.search(
                        store.rpartition("/")[2], query=query.query_str, max_num_results=3
                    )
                return [
                    schema.NodeWithScore(
                        node=schema.TextNode(text=result.content[0].text), score=result.score
                    )
                    for result in page.data
                ]

        def ask() -> Any:
            with httpx.Client(timeout=PATIENCE_S) as http:
                model = chat_model(url, http)
                engine = engines.RetrieverQueryEngine.from_args(StoreRetriever(), llm=model)
                return engine.query("From which pier does the ferry leave?")

        answer = await asyncio.to_thread(ask)
    assert str(answer) == "Pier 7"
    assert [node.text for node in answer.source_nodes] == ["The ferry leaves from pier 7."]
    (request,) = gateway.log.requests
    assert request.prompt_tokens, "LlamaIndex has put the passage into the prompt"
