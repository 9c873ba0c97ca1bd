"""A retrieval in, hits out, without a log: collections, tenants, probes, every kind of error."""

import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from schemas import errors
from schemas.codec import Codec
from schemas.records import (
    Document,
    Hits,
    RetrievalRequest,
)
from schemas.retrieval import CHECK, pack_vector, unpack_vector
from streams.log.clock import wall_ms
from tests.workers.vector.data import gaussian, nearest
from workers.retrieval.collections import Collections
from workers.retrieval.passages.changes import DocumentChange
from workers.retrieval.responder import Responder
from workers.retrieval.settings import RetrievalSettings, ShardPlace
from workers.vector.engine.engine import EngineSettings, SearchEngine
from workers.vector.index.kinds import SearchKind

SETTINGS = RetrievalSettings(metrics=("books=sqeuclidean", "films=inner_product"))
BOOKS, FILMS = gaussian(1_400, 6), gaussian(30, 11, seed=1)


def change(collection: str, name: str, vector: Any, **metadata: Any) -> DocumentChange:
    document = Document(
        document_id=name, collection=collection, vector=pack_vector(vector), at_ms=0,
        metadata=json.dumps(metadata),
    )  # fmt: skip
    return DocumentChange(collection, name, document)


@pytest.fixture
async def responder() -> AsyncIterator[Responder]:
    collections = Collections(SETTINGS)
    books = [change("books", f"b{i}", row, tenant=f"t{i % 3}") for i, row in enumerate(BOOKS)]
    films = [change("films", f"f{i}", row) for i, row in enumerate(FILMS)]
    empty = [change("empty", "x", [1.0]), DocumentChange("empty", "x", None)]
    assert collections.apply([*books, *films, empty[0]]) == []
    assert collections.apply([empty[1]]) == []
    collections.get("books").link()
    engine = SearchEngine(EngineSettings(lanes=1))
    yield Responder(engine, collections, SETTINGS, worker_id="w", place=ShardPlace(1, 4))
    await engine.close()


def request(vector: Any = BOOKS[0], **fields: Any) -> RetrievalRequest:
    fields = {"collection": "books", "k": 5, "deadline_ms": wall_ms() + 60_000, **fields}
    return RetrievalRequest(
        retrieval_id="q", request_id="r", asker_id="a", reply_partition=0,
        vector=pack_vector(vector), asked_ms=0, **fields,
    )  # fmt: skip


async def test_responder_serves_collections_of_several_dimensions_and_metrics(
    responder: Responder,
) -> None:
    books = await responder.hits(request(BOOKS[7]), SearchKind.PREFILL)
    assert list(books.document_ids) == [f"b{i}" for i in nearest(BOOKS, BOOKS[7:8], 5)[0]]
    assert unpack_vector(books.distances)[0] == 0 and not books.exact
    assert (books.retrieval_id, books.request_id, books.worker_id) == ("q", "r", "w")
    assert (books.shard, books.shards, books.collection) == (1, 4, "books")
    films = await responder.hits(request(FILMS[3], collection="films"), SearchKind.DECODE)
    best = np.argsort(-FILMS @ FILMS[3])[:5]
    assert list(films.document_ids) == [f"f{i}" for i in best] and films.exact
    np.testing.assert_allclose(unpack_vector(films.distances), -(FILMS @ FILMS[3])[best], rtol=1e-5)


async def test_tenant_filter_returns_only_documents_of_tenant(responder: Responder) -> None:
    for tenant in range(3):
        is_own = np.arange(len(BOOKS)) % 3 == tenant
        tenant_request = request(BOOKS[1], filter=json.dumps({"tenant": f"t{tenant}"}))
        hits = await responder.hits(tenant_request, SearchKind.DECODE)
        truth = nearest(BOOKS, BOOKS[1:2], 5, is_own)[0]
        assert list(hits.document_ids) == [f"b{i}" for i in truth]
    empty_hits = await responder.hits(request(filter='{"tenant": "t9"}'), SearchKind.DECODE)
    assert empty_hits.error is None and empty_hits.document_ids == () and empty_hits.exact


async def test_filter_returns_all_allowed_rows_when_fewer_than_k(
    responder: Responder,
) -> None:
    index = responder._collections.get("books")
    index.delete([f"b{i}" for i in range(1_000)])
    filtered_request = request(k=300, filter='{"tenant": {"$in": ["t0", "t1"]}}')
    hits = await responder.hits(filtered_request, SearchKind.DECODE)
    expected = [i for i in range(1_000, 1_400) if i % 3 < 2]
    assert len(hits.document_ids) == len(expected)
    assert {int(name[1:]) for name in hits.document_ids} == set(expected)


async def test_seeds_of_probe_start_next_probe(responder: Responder) -> None:
    first = await responder.hits(request(wants_seeds=True), SearchKind.DECODE)
    assert set(first.document_ids) < set(first.seeds) and len(first.seeds) == SETTINGS.top_m
    seeds = (*first.seeds, "gone", "b")
    warm = await responder.hits(request(seeds=seeds, top_m=16), SearchKind.DECODE)
    assert warm.document_ids == first.document_ids
    assert warm.distances_computed < first.distances_computed


BAD: list[tuple[dict[str, Any], type[errors.TriviumError], str]] = [
    ({"vector": [1.0, 2.0]}, errors.WrongDimension, r"expected vectors of 6 .* found shape \(2,\)"),
    ({"vector": [np.nan] * 6}, errors.InvalidVector, "expected finite values"),
    ({"collection": "songs"}, errors.UnknownCollection, "no collection 'songs'.*books, empty, fil"),
    ({"collection": "empty", "vector": [1.0]}, errors.EmptyIndex, "expected an index with rows"),
    ({"filter": '{"year": 1}'}, errors.UnknownFilterField, "field 'year'"),
    ({"filter": '{"tenant": 1}'}, errors.UnknownFilterField, "tenant"),
    ({"filter": "tenant"}, errors.InvalidRequest, "expected a JSON object"),
    ({"k": 0}, errors.InvalidRequest, "expected k from 1 to 512, found 0"),
    ({"k": 10**6}, errors.InvalidRequest, "expected k from 1 to 512, found 1000000"),
    ({"top_m": 10**6}, errors.InvalidRequest, "expected top_m from 1 to 2048, found 1000000"),
    ({"width": -1}, errors.InvalidRequest, "expected width from 1 to .*, found -1"),
    ({"seeds": ("x",) * 5_000}, errors.InvalidRequest, "at most 4096 seeds, found 5000"),
    ({"deadline_ms": 1}, errors.DeadlineExceeded, "passed .* ms before the retrieval was read"),
]


@pytest.mark.parametrize(("fields", "error", "message"), BAD)
async def test_responder_reports_error_of_wrong_request(
    responder: Responder, fields: dict[str, Any], error: type[errors.TriviumError], message: str
) -> None:
    hits = await responder.hits(request(**{"vector": BOOKS[0], **fields}), SearchKind.DECODE)
    assert hits.error is not None and hits.document_ids == ()
    assert hits.error.code == error.code
    with pytest.raises(errors.TriviumError, match=message):
        raise error(hits.error.message)
    assert responder.tallies.searches == 1
    assert responder.tallies.misses == (error is errors.DeadlineExceeded)
    next_hits = await responder.hits(request(), SearchKind.DECODE)
    assert next_hits.error is None and next_hits.document_ids[0] == "b0"


async def test_tallies_count_retrieval_outcomes_by_class(responder: Responder) -> None:
    for k in (1, 2, 0):
        await responder.hits(request(k=k), SearchKind.PREFILL)
    await responder.hits(request(deadline_ms=1), SearchKind.DECODE)
    await responder.hits(request(mode=CHECK), SearchKind.DECODE)
    prefill, decode = responder.tallies.to_records()
    assert (prefill.kind, prefill.outcomes) == ("prefill", {"completed": 2, "invalid_request": 1})
    assert (sum(prefill.waits), sum(prefill.times)) == (2, 3)
    assert prefill.took_ms > prefill.waited_ms >= 0
    assert (decode.kind, decode.outcomes) == ("decode", {"deadline_exceeded": 1})
    assert (sum(decode.waits), sum(decode.times)) == (0, 1)
    assert (responder.tallies.searches, responder.tallies.misses) == (4, 1)


async def test_responder_reports_engine_defect_as_error(
    responder: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> Hits:
        raise ZeroDivisionError

    monkeypatch.setattr(responder._engine, "search", broken)
    hits = await responder.hits(request(), SearchKind.DECODE)
    assert hits.error is not None and hits.error.code == errors.EngineFailed.code
    assert "the log of w says why" in hits.error.message


async def test_k_beyond_collection_returns_all_documents(responder: Responder) -> None:
    film_request = dataclasses.replace(request(FILMS[0], collection="films"), k=400)
    hits = await responder.hits(film_request, SearchKind.DECODE)
    assert sorted(hits.document_ids) == sorted(f"f{i}" for i in range(30))


async def test_responder_reports_error_for_invalid_utf8_field(responder: Responder) -> None:
    """JSON may hold half a character; an error that names it must still reach the asker."""
    odd = Document(
        document_id="odd", collection="books", vector=pack_vector(BOOKS[0]), at_ms=0,
        metadata='{"\\ud800": "\\udfff"}',
    )  # fmt: skip
    ((_, refused),) = responder._collections.apply([DocumentChange("books", "odd", odd)])
    assert "half of a pair" in refused.message and refused.message.isascii()
    hits = await responder.hits(request(filter='{"\\ud800": 1}'), SearchKind.DECODE)
    assert hits.error is not None and "\\ud800" in hits.error.message
    assert Codec().decode(Codec().encode(hits)) == hits


async def test_patience_of_request_ends_search_early(responder: Responder) -> None:
    """An unchanged routing list ends the search; the worker's setting is the default."""
    patient = await responder.hits(request(top_m=256), SearchKind.DECODE)
    hasty = await responder.hits(request(top_m=256, patience=1), SearchKind.DECODE)
    assert hasty.error is None
    assert hasty.extends < patient.extends / 2
    assert hasty.document_ids[0] == patient.document_ids[0] == "b0"
    responder._settings = dataclasses.replace(responder._settings, patience=1)
    assert (await responder.hits(request(top_m=256), SearchKind.DECODE)).extends == hasty.extends
