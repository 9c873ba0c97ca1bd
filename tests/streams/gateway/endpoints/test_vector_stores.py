"""Vector stores over HTTP without a log: what is refused, who sees what, and what a search asks."""

import json
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from schemas.errors import EmptyIndex, NotReady, UnknownFilterField
from schemas.records import Passage, StoreFileResult
from streams.gateway.endpoints.vector_stores import reweight
from streams.log.clock import wall_ms
from streams.log.retrieval.results import Hit
from streams.openai.objects.table import key_of
from tests.streams.gateway.endpoints.test_files import keeping, upload
from tests.streams.gateway.in_process import InProcessGateway, found_hits
from tests.waits import until

STORES = "/v1/vector_stores"


async def send(
    gateway: InProcessGateway, path: str, body: Any = None, method: str = "", key: str = "one"
) -> tuple[int, Any]:
    """Status and JSON."""
    async with gateway.client() as client:
        response = await client.request(
            method or ("GET" if body is None else "POST"),
            path,
            json=body,
            headers={"authorization": f"Bearer {key}"},
        )
        return response.status_code, response.json()


async def new_store(gateway: InProcessGateway, **fields: Any) -> str:
    status, store = await send(gateway, STORES, fields)
    assert status == 200, store
    return f"{STORES}/{store['id']}"


async def file_of(gateway: InProcessGateway, name: str = "a.txt") -> str:
    return str((await upload(gateway, name)).json()["id"])


def complete(gateway: InProcessGateway, store: str, file_id: str) -> None:
    """As the indexer would say."""
    table = gateway.objects.table
    tenant = gateway.state.callers.keys.tenant({b"authorization": b"Bearer one"})
    names = table.store_order(tenant).beyond(None, newer=True)
    record = table.store(tenant, next(name for name in names if store.endswith(name)))
    assert record is not None
    entry = table.contents(record).entry(file_id)
    assert entry is not None
    result = StoreFileResult(
        store_id=record.store_id,
        file_id=file_id,
        tenant=record.tenant,
        revision=entry.spec.revision,
        status="completed",
        documents=1,
        usage_bytes=9,
        at_ms=1,
    )
    table.apply(key_of(result), result)


async def test_vector_store_is_created_changed_listed_and_deleted() -> None:
    gateway = keeping()
    sizes = {"max_chunk_size_tokens": 200, "chunk_overlap_tokens": 50}
    chunks = {"type": "static", "static": sizes}
    path = await new_store(gateway, name="a", metadata={"k": "v"}, chunking_strategy=chunks)
    _, store = await send(gateway, path)
    assert (store["name"], store["metadata"], store["expires_at"]) == ("a", {"k": "v"}, None)
    days = {"anchor": "last_active_at", "days": 2}
    _, store = await send(gateway, path, {"name": "b", "expires_after": days})
    assert (store["name"], store["metadata"], store["expires_after"]) == ("b", {"k": "v"}, days)
    assert store["expires_at"] == store["last_active_at"] + 2 * 86_400
    _, store = await send(gateway, path, {"metadata": None, "expires_after": None})
    assert (store["name"], store["metadata"], store["expires_after"]) == ("b", {}, None)
    file_id = await file_of(gateway)
    _, file = await send(gateway, path + "/files", {"file_id": file_id})
    assert (file["status"], file["chunking_strategy"]) == ("in_progress", chunks)
    assert (await send(gateway, path))[1]["status"] == "in_progress"
    complete(gateway, path, file_id)
    _, store = await send(gateway, path)
    assert (store["status"], store["usage_bytes"]) == ("completed", 9)
    assert await send(gateway, path, method="DELETE") == (
        200,
        {"id": store["id"], "object": "vector_store.deleted", "deleted": True},
    )
    assert (await send(gateway, path))[0] == 404
    assert (await send(gateway, STORES))[1]["data"] == []


async def test_vector_store_list_pages_in_both_directions() -> None:
    gateway, paths = keeping(), list[str]()
    for number in range(5):  # in one millisecond they would have no order
        paths.append(await new_store(gateway, name=str(number)))
        made_ms = wall_ms()
        await until(lambda made_ms=made_ms: wall_ms() > made_ms)
    ids = [path.rpartition("/")[2] for path in paths]

    async def names(query: str) -> tuple[str, bool]:
        _, page = await send(gateway, f"{STORES}?{query}")
        return "".join(store["name"] for store in page["data"]), page["has_more"]

    assert await names("order=asc&limit=2") == ("01", True)
    assert await names("order=asc&limit=3") == ("012", True)
    assert await names(f"order=asc&limit=2&after={ids[1]}") == ("23", True)
    assert await names(f"order=asc&limit=2&after={ids[3]}") == ("4", False)
    assert await names(f"limit=2&after={ids[3]}") == ("21", True)
    assert await names(f"order=asc&limit=2&before={ids[4]}") == ("23", True)
    assert await names(f"order=asc&limit=9&before={ids[2]}") == ("01", False)
    for query in ("limit=0", "limit=101", "order=up", "after=nobody", "limit=x"):
        assert (await send(gateway, f"{STORES}?{query}"))[0] == 400, query


async def test_vector_store_is_hidden_from_other_tenants() -> None:
    gateway = keeping()
    path, file_id = await new_store(gateway), await file_of(gateway)
    _, batch = await send(gateway, path + "/file_batches", {"file_ids": [file_id]})
    batches = f"{path}/file_batches/{batch['id']}"
    for method, where, body in (
        ("GET", path, None),
        ("POST", path, {"name": "mine"}),
        ("DELETE", path, None),
        ("POST", path + "/search", {"query": "a"}),
        ("GET", path + "/files", None),
        ("POST", path + "/files", {"file_id": file_id}),
        ("GET", f"{path}/files/{file_id}", None),
        ("POST", f"{path}/files/{file_id}", {"attributes": {}}),
        ("DELETE", f"{path}/files/{file_id}", None),
        ("GET", f"{path}/files/{file_id}/content", None),
        ("POST", path + "/file_batches", {"file_ids": [file_id]}),
        ("GET", batches, None),
        ("POST", batches + "/cancel", {}),
        ("GET", batches + "/files", None),
    ):
        status, answer = await send(gateway, where, body, method, key="two")
        assert status == 404, (method, where, answer)
    foreign_store = await new_store(keeping())
    status, answer = await send(gateway, STORES, {"file_ids": [file_id]}, key="two")
    assert (status, answer["error"]["message"]) == (404, f"no such file: {file_id!r}")
    assert (await send(gateway, foreign_store))[0] == 404


CHUNKS = {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 51}
WRONG: list[tuple[str, Any, int, str]] = [
    ("", {"name": 7}, 400, "name: expected a valid string"),
    ("", {"colour": "red"}, 400, "colour: unknown field"),
    ("", {"metadata": {"k": 1}}, 400, "metadata.k: expected a valid string"),
    ("", {"metadata": {str(n): "" for n in range(17)}}, 400, "at most 16"),
    ("", {"expires_after": {"anchor": "created_at", "days": 1}}, 400, "expires_after.anchor"),
    ("", {"expires_after": {"anchor": "last_active_at", "days": 0}}, 400, "greater than or equal"),
    ("", {"file_ids": ["file-none"]}, 404, "no such file: 'file-none'"),
    ("", {"chunking_strategy": {"type": "static", "static": CHUNKS}}, 400, "at most half of max"),
    ("", {"chunking_strategy": {"type": "odd"}}, 400, "chunking_strategy"),
    ("/files", {}, 400, "file_id: required, but missing"),
    ("/files", {"file_id": "file-none"}, 404, "no such file: 'file-none'"),
    ("/files", {"file_id": "FILE", "attributes": {"a": []}}, 400, "attributes.a: expected a text"),
    ("/files", {"file_id": "FILE", "attributes": {"a": 1e300}}, 400, "within +-2**53"),
    ("/files", {"file_id": "FILE", "attributes": {"$a": 1}}, 400, "do not begin with $"),
    ("/files", {"file_id": "FILE", "attributes": {"file_id": 1}}, 400, "every document has it"),
    ("/files", {"file_id": "FILE", "attributes": {"title": 1}}, 400, "expected a text or truth"),
    ("/files", {"file_id": "FILE", "attributes": [1]}, 400, "attributes"),
    (
        *("/files", {"file_id": "FILE", "chunking_strategy": {"type": "auto", "x": 1}}, 400),
        "chunking_strategy",
    ),
    ("/file_batches", {}, 400, "expected either file_ids or files"),
    ("/file_batches", {"file_ids": []}, 400, "file_ids: expected at least 1"),
    ("/file_batches", {"file_ids": ["FILE", "no"]}, 404, "no such file: 'no'"),
    ("/file_batches", {"files": [{"file_id": "FILE", "x": 1}]}, 400, "unknown field"),
    ("/search", {}, 400, "query: required, but missing"),
    ("/search", {"query": " "}, 400, "query: expected a text of 1 to 8192 characters"),
    ("/search", {"query": []}, 400, "query: expected 1 to 16 texts, found 0"),
    ("/search", {"query": "a", "max_num_results": 51}, 400, "less than or equal to 50"),
    ("/search", {"query": "a", "rewrite_query": True}, 400, "queries are not rewritten here"),
    ("/search", {"query": "a", "filters": {"type": "x"}}, 400, "filters: expected a type"),
    ("/search", {"query": "a", "ranking_options": {"ranker": "x"}}, 400, "ranking_options.ranker"),
    (
        *("/search", {"query": "a", "ranking_options": {"score_threshold": 2}}, 400),
        "ranking_options.score_threshold",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), WRONG)
async def test_vector_store_endpoints_reject_invalid_fields(
    path: str, body: Any, status: int, message: str
) -> None:
    gateway = keeping()
    store, file_id = await new_store(gateway), await file_of(gateway)
    before = len(gateway.objects.table)
    body = json.loads(json.dumps(body).replace("FILE", file_id))
    actual_status, answer = await send(gateway, (store if path else STORES) + path, body)
    assert (actual_status, message in answer["error"]["message"]) == (status, True), answer
    assert len(gateway.objects.table) == before


async def test_vector_store_endpoints_return_404_for_unknown_ids() -> None:
    gateway = keeping()
    store, file_id = await new_store(gateway), await file_of(gateway)
    for path, message in (
        (f"{STORES}/vs_none", "no such vector store: 'vs_none'"),
        (f"{store}/files/{file_id}", "no such file in vector store"),
        (f"{store}/file_batches/vsfb_none", "no such file batch"),
    ):
        status, answer = await send(gateway, path)
        assert status == 404 and message in answer["error"]["message"]


async def test_vector_store_attributes_have_one_type_per_field() -> None:
    """An index has numbers or labels in a field; it would drop passages of the other type."""
    gateway = keeping()
    store = await new_store(gateway)
    first, second = await file_of(gateway), await file_of(gateway)
    files = store + "/files"
    assert (await send(gateway, files, {"file_id": first, "attributes": {"y": 1}}))[0] == 200
    wrong = {"file_id": second, "attributes": {"y": "1"}}
    status, answer = await send(gateway, files, wrong)
    assert status == 400 and "attributes.y: expected a number" in answer["error"]["message"]
    status, answer = await send(gateway, f"{files}/{first}", {"attributes": {"y": "now a text"}})
    assert status == 400 and "take the file out of the store first" in answer["error"]["message"]
    assert (await send(gateway, f"{files}/{first}", {"attributes": {"z": "x"}}))[0] == 200
    _, changed = await send(gateway, f"{files}/{first}", {"attributes": {"y": "now a text"}})
    assert (changed["attributes"], changed["status"]) == ({"y": "now a text"}, "in_progress")


async def test_vector_store_files_share_one_chunking_strategy() -> None:
    gateway = keeping()
    store, file_id = await new_store(gateway), await file_of(gateway)
    sizes = {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 0}
    chunks = {"type": "static", "static": sizes}
    body = {"file_id": file_id, "chunking_strategy": chunks}
    status, answer = await send(gateway, store + "/files", body)
    assert status == 400 and "all files of a vector store are cut alike" in str(answer)
    static_store = await new_store(gateway, chunking_strategy=chunks)
    assert (await send(gateway, static_store + "/files", body))[0] == 200


async def test_vector_store_search_queries_its_collection() -> None:
    gateway = keeping()
    store, file_id = await new_store(gateway), await file_of(gateway)
    attached = {"file_id": file_id, "attributes": {"year": 2020}}
    await send(gateway, store + "/files", attached)
    gateway.pool.search_results = [
        found_hits(
            hit(file_id, "both", 0.5, 0.03), hit("file-gone", "of a deleted file", 0.9, 0.02)
        ),
        found_hits(hit(file_id, "both", 0.7, 0.01), hit(file_id, "second", -0.2, 0.02)),
    ]
    year = {"type": "gte", "key": "year", "value": 2000}
    ranking = {"ranker": "auto", "score_threshold": 0.25}
    body = {"query": ["a", "b"], "max_num_results": 7, "filters": year, "ranking_options": ranking}
    status, page = await send(gateway, store + "/search", body)
    assert (status, page["object"]) == (200, "vector_store.search_results.page")
    assert page["search_query"] == ["a", "b"] and not page["has_more"]
    assert [(result["content"][0]["text"], result["score"]) for result in page["data"]] == [
        ("both", 0.5),
        ("second", 0.0),
    ]
    assert page["data"][0]["attributes"] == {"year": 2020}
    assert page["data"][0]["filename"] == "a.txt"
    search = gateway.pool.searches[0]
    assert search["collection"] == store.rpartition("/")[2] and search["k"] == 7
    assert search["tenant"] == gateway.state.callers.keys.tenant({b"authorization": b"Bearer one"})
    assert json.loads(search["filter"]) == {"year": {"$gte": 2000}}
    assert (search["min_score"], search["mode"]) == (0.25, "hybrid")


def hit(file_id: str, text: str, score: float, fused: float) -> Hit:
    passage = Passage(passage_id=f"{file_id}/0#{text}", document_id=f"{file_id}/0", text=text)
    return Hit(passage.passage_id, 0.1, score=score, fused=fused, passage=passage)


@pytest.mark.parametrize(
    ("weights", "mode"), [((1, 0), "vector"), ((0, 1), "words"), ((0.3, 0.7), "hybrid")]
)
async def test_hybrid_weights_select_search_mode(weights: tuple[float, float], mode: str) -> None:
    gateway = keeping()
    store = await new_store(gateway)
    hybrid_weights = dict(zip(("embedding_weight", "text_weight"), weights, strict=True))
    body = {"query": "a", "ranking_options": {"hybrid_search": hybrid_weights}}
    assert (await send(gateway, store + "/search", body))[0] == 200
    assert gateway.pool.searches[0]["mode"] == mode


def test_hybrid_weights_reorder_hits() -> None:
    near = replace(hit("file-1", "near", 0.9, 0.01), distance=0.1)
    lexical = replace(hit("file-1", "said", 0.1, 0.02), distance=0.9, words=7.0)
    both = [near, replace(lexical, distance=inf)]

    def best(*weights: float) -> str:
        ranking = reweight(both, (weights[0], weights[1]))
        return max(ranking, key=lambda candidate: candidate.fused).document_id

    assert best(0.9, 0.1) == near.document_id and best(0.1, 0.9) == lexical.document_id
    assert reweight(both, (1, 1)) == both


async def test_vector_store_search_rejects_all_zero_weights() -> None:
    gateway = keeping()
    none = {"hybrid_search": {"embedding_weight": 0, "text_weight": 0}}
    body = {"query": "a", "ranking_options": none}
    status, answer = await send(gateway, await new_store(gateway) + "/search", body)
    assert status == 400 and "expected a weight above 0" in answer["error"]["message"]


async def test_vector_store_search_maps_pool_errors_to_statuses() -> None:
    gateway = keeping()
    path = await new_store(gateway) + "/search"
    for trouble, status in (
        (EmptyIndex("empty"), 200),
        (UnknownFilterField("no row has it"), 400),
        (NotReady("nobody searches"), 503),
    ):
        gateway.pool.trouble = trouble
        assert (await send(gateway, path, {"query": "a"}))[0] == status


async def test_vector_store_search_reports_missing_shards() -> None:
    gateway = keeping()
    path = await new_store(gateway) + "/search"
    wrong = NotReady("away").to_wire()
    result = replace(found_hits(missing={1: wrong}), degraded="no embedding worker is ready")
    gateway.pool.search_results = [result]
    _, page = await send(gateway, path, {"query": "a"})
    assert page["trivium"] == {"missing_shards": [1], "degraded": result.degraded}


async def test_cancelled_file_batch_keeps_completed_files() -> None:
    gateway = keeping()
    store = await new_store(gateway)
    first, second = await file_of(gateway), await file_of(gateway)
    _, batch = await send(
        gateway, store + "/file_batches", {"files": [{"file_id": first}, {"file_id": second}]}
    )
    complete(gateway, store, first)
    path = f"{store}/file_batches/{batch['id']}"
    _, batch = await send(gateway, path + "/cancel", {})
    assert (batch["status"], batch["file_counts"]["cancelled"]) == ("cancelled", 1)
    assert batch["file_counts"]["completed"] == 1
    _, page = await send(gateway, path + "/files?filter=cancelled")
    assert [file["id"] for file in page["data"]] == [second]
    assert (await send(gateway, path + "/files?filter=odd"))[0] == 400
