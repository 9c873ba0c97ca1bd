"""The collections of a shard, fed with changes."""

from typing import Any

import numpy as np

from schemas.records import (
    Document,
)
from schemas.retrieval import pack_vector
from workers.search.service.collections import Collections
from workers.search.service.settings import RetrievalSettings
from workers.search.words.changes import DocumentChange


def change(name: str, vector: Any, collection: str = "c", **fields: Any) -> DocumentChange:
    document = Document(
        document_id=name, collection=collection, vector=pack_vector(vector), at_ms=0, **fields
    )
    return DocumentChange(collection, name, document)


def test_one_wrong_document_of_many_is_left_out_alone() -> None:
    held = Collections(RetrievalSettings(collections_max=1))
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
    failed = held.apply([good[0], *wrong, *good[1:]])
    assert {each.document_id for each, _ in failed} == {each.document_id for each in wrong}
    (state,) = held.states()
    assert (state.name, state.dim, state.documents) == ("c", 2, 1)
    assert held.apply([DocumentChange("nowhere", "x", None)]) == []


def test_a_collection_tells_its_rows_memory_and_effort() -> None:
    held = Collections(RetrievalSettings(recalls=("c=0.9",), top_m=50))
    many = np.random.default_rng(1).normal(size=(600, 64)).astype(np.float32)
    held.apply([change(f"a{i}", row) for i, row in enumerate(many)])
    held.apply([DocumentChange("c", f"a{i}", None) for i in range(7)])
    held.apply([change("x", [1.0], "d")])
    c, d = held.states()
    assert (c.rows, c.dead_rows, c.loose_rows, c.documents) == (600, 7, 600, 593)
    assert (c.recall, c.top_m) == (0.9, 128), "nothing is measured yet"
    assert (d.rows, d.recall, d.top_m) == (1, 0.0, 50)
    index = held.get("c")
    assert c.bytes_held >= many.nbytes > d.bytes_held - many.nbytes
    index.link()
    linked = held.states()[0]
    assert linked.loose_rows == 0
    graph_and_codes = index.graph.nbytes + 600 * 64
    assert linked.bytes_held >= c.bytes_held + graph_and_codes
    held.apply([change("b", many[0], metadata='{"year": 1}', text="t" * 5_000)])
    assert held.states()[0].bytes_held >= linked.bytes_held + 5_000
    index.compact()
    assert (held.states()[0].rows, held.states()[0].dead_rows) == (594, 0)


def test_an_empty_collection_makes_room_and_may_begin_anew() -> None:
    held = Collections(RetrievalSettings(collections_max=1))
    assert held.apply([change("a", [1, 0])]) == []
    ((_, error),) = held.apply([change("b", [1, 0, 0], "d")])
    assert "1 collections are held already; raise [retrieval] collections_max" in error.message
    held.apply([DocumentChange("c", "a", None)])
    assert held.apply([change("b", [1, 0, 0])]) == []
    assert [(state.name, state.dim) for state in held.states()] == [("c", 3)]
    held.apply([DocumentChange("c", "b", None)])
    assert held.apply([change("b", [1], "d")]) == []
    assert [(state.name, state.dim) for state in held.states()] == [("d", 1)]
