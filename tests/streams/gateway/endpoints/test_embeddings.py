"""Vectors and ranks over HTTP: by hand, and by the real `openai` and LangChain clients."""

import base64
from typing import Any

import numpy as np
import openai
import pytest
from pydantic import SecretStr

from schemas.errors import NotReady
from streams.calls.embedding import TEXT_CHARS_MAX
from tests.streams.gateway.in_process import InProcessGateway, call, http_client, serving
from tests.waits import PATIENCE_S

EMBED, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/score"


def texts(value: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "letters", "input": value, **fields}


def ranked(*documents: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "letters@1", "query": "aab", "documents": documents} | fields


async def test_embeddings_keep_order_of_texts() -> None:
    status, answer = await call(InProcessGateway(), texts(["a", "bb"]), EMBED)
    assert (status, answer["object"], answer["model"]) == (200, "list", "letters@1")
    assert [entry["index"] for entry in answer["data"]] == [0, 1]
    assert [np.argmax(entry["embedding"]) for entry in answer["data"]] == [0, 1]
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


async def test_base64_embeddings_equal_plain_ones() -> None:
    _, plain = await call(InProcessGateway(), texts("abc"), EMBED)
    _, packed = await call(InProcessGateway(), texts("abc", encoding_format="base64"), EMBED)
    data = base64.b64decode(packed["data"][0]["embedding"])
    written = np.array(plain["data"][0]["embedding"], np.float32)
    assert np.array_equal(np.frombuffer(data, "<f4"), written)


async def test_openai_and_langchain_clients_read_embeddings() -> None:
    from langchain_openai import OpenAIEmbeddings  # slow to import

    async with serving(InProcessGateway(api_keys=("key",))) as url:
        async with openai.AsyncOpenAI(
            base_url=url + "/v1", api_key="key", timeout=PATIENCE_S
        ) as client:
            answer = await client.embeddings.create(model="letters", input=["a", "b"])
        assert [int(np.argmax(embedding.embedding)) for embedding in answer.data] == [0, 1]
        async with http_client(url) as http:
            langchain = OpenAIEmbeddings(
                model="letters",
                base_url=url + "/v1",
                api_key=SecretStr("key"),
                check_embedding_ctx_length=False,
                http_async_client=http,
            )
            assert np.argmax(await langchain.aembed_query("c")) == 2


async def test_rerank_orders_documents_by_similarity_then_index() -> None:
    body = ranked("bb", "aab", {"text": "aab"}, "c", top_n=3, return_documents=True)
    status, answer = await call(InProcessGateway(), body, RERANK)
    assert status == 200
    assert [result["index"] for result in answer["results"]] == [1, 2, 0]
    assert answer["results"][1]["document"] == {"text": "aab"}
    assert answer["results"][0]["relevance_score"] == pytest.approx(1)


@pytest.mark.parametrize(
    "names",
    [("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")],
)
async def test_score_compares_one_text_with_each_or_pairwise(names: tuple[str, str]) -> None:
    first, second = names
    for path in ("/score", "/v1/score"):
        body = {"model": "letters", first: "aab", second: ["aab", "bb", "c"]}
        status, answer = await call(InProcessGateway(), body, path)
        assert (status, answer["object"], answer["model"]) == (200, "list", "letters@1")
        assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
        assert {entry["object"] for entry in answer["data"]} == {"score"}
        scores = [entry["score"] for entry in answer["data"]]
        assert scores == pytest.approx([1, 5**-0.5, 0])
        assert answer["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
        body = {first: ["a", "b"], second: ["a", "c"]}
        _, answer = await call(InProcessGateway(), body, path)
        assert [entry["score"] for entry in answer["data"]] == pytest.approx([1, 0])
        _, answer = await call(InProcessGateway(), {first: "a", second: "a"}, path)
        assert [entry["score"] for entry in answer["data"]] == pytest.approx([1])


async def test_score_equals_relevance_of_rerank() -> None:
    documents = ["bb", "aab", "c", ""]
    _, ranks = await call(InProcessGateway(), ranked(*documents), RERANK)
    body = {"queries": "aab", "documents": documents}
    _, scores = await call(InProcessGateway(), body, "/score")
    relevance = {result["index"]: result["relevance_score"] for result in ranks["results"]}
    assert {entry["index"]: entry["score"] for entry in scores["data"]} == relevance
    for path in ("/rerank", "/v2/rerank"):
        _, same = await call(InProcessGateway(), ranked(*documents), path)
        assert same["results"] == ranks["results"]


async def test_openai_client_posts_scores() -> None:
    """The package has no method of its own for them."""
    async with serving(InProcessGateway()) as url:
        async with openai.AsyncOpenAI(
            base_url=url + "/v1", api_key="key", timeout=PATIENCE_S
        ) as client:
            body = {"text_1": "a", "text_2": ["a", "b"]}
            answer: Any = await client.post("/score", body=body, cast_to=object)
            assert [entry["score"] for entry in answer["data"]] == pytest.approx([1, 0])
            with pytest.raises(openai.BadRequestError, match="text_2: expected as many texts"):
                body = {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}
                await client.post("/score", body=body, cast_to=object)


async def test_embeddings_accept_token_ids_of_embedding_model() -> None:
    """vLLM accepts them, too; the embedding worker knows the vocabulary."""
    _, texts_of_two = await call(InProcessGateway(), texts(["ab", "c"]), EMBED)
    ids: Any = [[97, 98.0], [99]]
    _, from_ids = await call(InProcessGateway(), texts(ids), EMBED)
    assert from_ids["data"] == texts_of_two["data"]
    _, from_first_ids = await call(InProcessGateway(), texts(ids[0]), EMBED)
    assert from_first_ids["data"] == texts_of_two["data"][:1]


async def test_embeddings_accept_empty_and_very_long_texts() -> None:
    """Models see the beginning; one bad text must not stop a job of thousands."""
    long = "a" * (TEXT_CHARS_MAX + 1)
    status, answer = await call(InProcessGateway(), texts(["", long + "b", "c"]), EMBED)
    assert status == 200 and len(answer["data"]) == 3
    _, cut = await call(InProcessGateway(), texts(long), EMBED)
    assert answer["data"][1]["embedding"] == cut["data"][0]["embedding"]
    status, answer = await call(InProcessGateway(), ranked("", long, query=long), RERANK)
    assert status == 200 and answer["results"][0]["index"] == 1


async def test_embeddings_default_to_served_model() -> None:
    status, answer = await call(InProcessGateway(), {"input": "a"}, EMBED)
    assert (status, answer["model"]) == (200, "letters@1")


async def test_rerank_returns_documents_only_on_request() -> None:
    _, answer = await call(InProcessGateway(), ranked("a"), RERANK)
    assert "document" not in answer["results"][0]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (EMBED, texts([]), 400, "input: expected a text or 1 to 2048 texts"),
        (EMBED, texts([1, -2]), 400, "input.0: expected texts, or token ids of the embedding"),
        (EMBED, texts([[1], []]), 400, "input.1: expected texts, or token ids of the embedding"),
        (EMBED, texts([1, "a"]), 400, "input.0: expected texts, or token ids"),
        (EMBED, texts(["a", 1]), 400, "input.1: expected a text, found 1"),
        (EMBED, texts({"a": 1}), 400, "input: expected a text or"),
        (EMBED, texts("a", dimensions=3), 400, "dimensions: the model has 8, found 3"),
        (EMBED, texts("a", inputt="b"), 400, "inputt: unknown field"),
        (EMBED, {**texts("a"), "model": "no"}, 404, "model: expected 'letters', found 'no'"),
        (RERANK, ranked(), 400, "documents: expected at least 1 of them"),
        (RERANK, ranked({"title": "x"}), 400, "documents.0: expected a text"),
        (SCORE, {}, 400, "queries: expected queries and documents, or queries and items, text_1"),
        (SCORE, {"queries": "a", "text_2": "b"}, 400, "data_2, found queries, text_2"),
        (SCORE, {"queries": "a", "documents": "b", "items": "c"}, 400, "found documents, items"),
        (SCORE, {"queries": "a", "documents": []}, 400, "documents: expected a text or several"),
        (SCORE, {"text_1": ["a", 3], "text_2": "b"}, 400, "text_1.1: expected a text, found 3"),
        (
            SCORE,
            {"text_1": {"a": 1}, "text_2": "b"},
            400,
            "text_1: expected a text, found {'a': 1}",
        ),
        (SCORE, {"text_1": ["a"] * 2, "text_2": "b"}, 400, "text_2: expected as many texts as"),
        (SCORE, {"text_1": "a", "text_2": ["b"] * 2_048}, 400, "text_2: expected at most 2048"),
        (SCORE, {"text_1": "a", "text_2": "b", "model": "no"}, 404, "model: expected 'letters'"),
        (SCORE, {"text_1": "a", "text_2": "b", "max_tokens_per_doc": 9}, 400, "max_tokens_per_doc"),
        (RERANK, ranked("a", top_n=0), 400, "top_n: expected greater than or equal to 1"),
    ],
)
async def test_embeddings_and_rerank_reject_invalid_fields(
    path: str, body: Any, status: int, message: str
) -> None:
    actual_status, answer = await call(InProcessGateway(), body, path)
    assert actual_status == status
    assert message in answer["error"]["message"]


async def test_embeddings_return_503_without_worker() -> None:
    gateway = InProcessGateway()
    gateway.pool.trouble = NotReady("no embedding worker is ready")
    status, answer = await call(gateway, texts("a"), EMBED)
    assert (status, answer["error"]["code"]) == (503, "not_ready")


async def test_embeddings_require_api_key() -> None:
    status, _ = await call(InProcessGateway(api_keys=("key",)), texts("a"), EMBED)
    assert status == 401
