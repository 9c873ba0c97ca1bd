"""The collections of a shard, fed with changes."""

from typing import Any

import numpy as np

from schemas.records import (
    Document,
)
from schemas.retrieval import pack_vector
from workers.retrieval.collections import Collections
from workers.retrieval.passages.changes import DocumentChange
from workers.retrieval.settings import RetrievalSettings


def change(name: str, vector: Any, collection: str = "c", **fields: Any) -> DocumentChange:
    document = Document(
        document_id=name, collection=collection, vector=pack_vector(vector), at_ms=0, **fields
    )
    return DocumentChange(collection, name, document)


def test_collections_reject_only_wrong_documents_of_batch() -> None:
    collections = Collections(RetrievalSettings(collections_max=1))
    wrong = [
        change("short", [1]),
        change("nan", [1, np.nan]),
        change("list", [1, 1], metadata="[1]"),
        change("slash", [1, 1], "a/b"),
        change("second", [1, 1], "d"),
    ]
    good = [
        change("a", [1, 0]),
        change("b", [0, 1]),
        change("a", [1, 1]),
        DocumentChange("c", "b", None),
    ]
    failed = collections.apply([good[0], *wrong, *good[1:]])
    assert {document_change.document_id for document_change, _ in failed} == {
        document_change.document_id for document_change in wrong
    }
    (state,) = collections.states()
    assert (state.name, state.dim, state.documents) == ("c", 2, 1)
    assert collections.apply([DocumentChange("nowhere", "x", None)]) == []


def test_collection_state_reports_rows_memory_and_effort() -> None:
    collections = Collections(RetrievalSettings(recalls=("c=0.9",), top_m=50))
    many = np.random.default_rng(1).normal(size=(600, 64)).astype(np.float32)
    collections.apply([change(f"a{i}", row) for i, row in enumerate(many)])
    collections.apply([DocumentChange("c", f"a{i}", None) for i in range(7)])
    collections.apply([change("x", [1.0], "d")])
    c, d = collections.states()
    assert (c.rows, c.dead_rows, c.loose_rows, c.documents) == (600, 7, 600, 593)
    assert (c.recall, c.top_m) == (0.9, 128), "nothing is measured yet"
    assert (d.rows, d.recall, d.top_m) == (1, 0.0, 50)
    index = collections.get("c")
    assert c.bytes_held >= many.nbytes > d.bytes_held - many.nbytes
    index.link()
    linked = collections.states()[0]
    assert linked.loose_rows == 0
    graph_and_codes = index.graph.nbytes + 600 * 64
    assert linked.bytes_held >= c.bytes_held + graph_and_codes
    collections.apply([change("b", many[0], metadata='{"year": 1}', text="t" * 5_000)])
    assert collections.states()[0].bytes_held >= linked.bytes_held + 5_000
    index.compact()
    assert (collections.states()[0].rows, collections.states()[0].dead_rows) == (594, 0)


def test_empty_collection_makes_room_and_accepts_new_dimension() -> None:
    collections = Collections(RetrievalSettings(collections_max=1))
    assert collections.apply([change("a", [1, 0])]) == []
    ((_, error),) = collections.apply([change("b", [1, 0, 0], "d")])
    assert "1 collections are held already; raise [retrieval] collections_max" in error.message
    collections.apply([DocumentChange("c", "a", None)])
    assert collections.apply([change("b", [1, 0, 0])]) == []
    assert [(state.name, state.dim) for state in collections.states()] == [("c", 3)]
    collections.apply([DocumentChange("c", "b", None)])
    assert collections.apply([change("b", [1], "d")]) == []
    assert [(state.name, state.dim) for state in collections.states()] == [("d", 1)]
