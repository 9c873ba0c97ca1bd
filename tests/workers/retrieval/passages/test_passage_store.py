"""Documents and their passages come on two topics: whatever is ahead, the end is the same."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InvalidRequest, InvalidVector, WrongDimension
from schemas.records import Chunk
from tests.workers.retrieval.passages.passage_fixtures import (
    collections,
    declared,
    deletion,
    document,
    no_passages,
    passages,
    record,
    rows,
    text,
    vector_of,
)
from workers.retrieval.passages.changes import DocumentChange, PassagesChange

V = vector_of("v")


def test_document_passages_change_together() -> None:
    shard_collections = collections()
    shard_collections.apply([text("a", 1), text("b", 2)])
    assert (
        shard_collections.apply_passages([passages("a", "x", "y", "z", offset=1, read_to=9)]) == []
    )
    assert rows(shard_collections) == {"a#0", "a#1", "a#2"}
    shard_collections.apply_passages(
        [passages("a", "w", offset=1, read_to=9), passages("b", "w", offset=2)]
    )
    assert rows(shard_collections) == {"a#0", "b#0"}
    state = shard_collections.states()[0]
    assert (state.documents, state.passages, state.embedder) == (2, 2, "hash@1")
    shard_collections.apply_passages([passages("a", offset=1, read_to=9)])
    assert rows(shard_collections) == {"b#0"}, "an empty text has no passages"
    shard_collections.apply_passages([no_passages("b")])
    assert rows(shard_collections) == set() and shard_collections.embedder_of("c") == ""
    assert shard_collections.stores["c"].documents == shard_collections.stores["c"].passages == 0


def test_document_changes_to_vector_and_back() -> None:
    shard_collections = collections()
    shard_collections.apply([text("a", 1)])
    shard_collections.apply_passages([passages("a", "x", "y", offset=1, read_to=2)])
    shard_collections.apply([document("a", 3, vector=V)])
    assert rows(shard_collections) == {"a"}
    assert shard_collections.apply_passages([passages("a", "x", "y", offset=1, read_to=4)]) == []
    assert rows(shard_collections) == {"a"}, "these are older"
    shard_collections.apply([text("a", 5)])
    assert rows(shard_collections) == set()
    shard_collections.apply_passages([passages("a", "x", offset=1, read_to=6)])
    assert rows(shard_collections) == set(), "older than the vector"
    shard_collections.apply_passages([no_passages("a", 6), passages("a", "z", offset=5, read_to=6)])
    assert rows(shard_collections) == {"a#0"}


def test_passages_may_precede_their_document() -> None:
    shard_collections = collections()
    shard_collections.apply([document("a", 1, vector=V)])
    shard_collections.apply_passages([passages("a", "x", offset=5, read_to=2)])
    assert rows(shard_collections) == {"a#0"}
    shard_collections.apply([document("a", 3, vector=V)])
    assert rows(shard_collections) == {"a#0"}, "an older vector changes nothing"
    shard_collections.apply([deletion("a", 4)])
    assert rows(shard_collections) == {"a#0"}, "nor an older deletion"
    shard_collections.apply([text("a", 5)])
    assert rows(shard_collections) == {"a#0"}
    shard_collections.apply([deletion("a", 6)])
    assert rows(shard_collections) == set()
    shard_collections.apply_passages([passages("a", "x", offset=5, read_to=7)])
    assert rows(shard_collections) == set(), "deleted means gone"


def test_orphan_passages_are_not_documents() -> None:
    """A slow embedding worker may have written last; a start reads the whole log."""
    shard_collections = collections()
    shard_collections.apply([text("b", 3)])
    shard_collections.apply_passages([passages("a", "x", offset=1, read_to=4)])
    assert rows(shard_collections) == set()


def test_skipped_changes_of_batch_still_count() -> None:
    for between in (deletion("a", 2), document("a", 2, vector=V)):
        shard_collections = collections()
        shard_collections.apply([text("a", 1)])
        shard_collections.apply_passages([passages("a", "x", offset=1, read_to=2)])
        shard_collections.apply([text("a", 3).after(between), text("b", 4).after(None)])
        assert rows(shard_collections) == set()
        shard_collections.apply_passages([passages("a", "x", offset=1, read_to=5)])
        assert rows(shard_collections) == set()
    assert deletion("a", 3).after(deletion("a", 2)).floor == -1
    assert text("a", 3).after(text("a", 2).after(deletion("a", 1))).floor == 1


EVENTS = st.lists(st.sampled_from(["text", "vector", "gone"]), min_size=1, max_size=6)


@given(EVENTS, st.data())
def test_topic_interleaving_does_not_change_result(kinds: list[str], data: Any) -> None:
    documents: list[DocumentChange] = []
    embedded: list[PassagesChange] = []
    for offset, kind in enumerate(kinds):
        if kind == "text":
            documents.append(text("a", offset))
            embedded.append(passages("a", *[f"t{offset}"] * (1 + offset % 3), offset=offset))
        else:
            documents.append(
                deletion("a", offset) if kind == "gone" else document("a", offset, vector=V)
            )
            embedded.append(no_passages("a"))
    shard_collections, read = collections(), 0
    waiting: list[tuple[str, Any]] = []
    order = data.draw(st.permutations(["d"] * len(documents) + ["p"] * len(embedded)))
    for topic in order:
        waiting.append((topic, documents[read] if topic == "d" else None))
        if topic == "d":
            shard_collections.apply([documents[read]])
            read += 1
        else:
            at = sum(1 for waiting_topic, _ in waiting if waiting_topic == "p") - 1
            change = embedded[at]
            shard_collections.apply_passages([PassagesChange("c", "a", change.passages, read)])
    last = len(kinds) - 1
    expected_rows = {
        "text": {f"a#{n}" for n in range(1 + last % 3)},
        "vector": {"a"},
        "gone": set(),
    }
    assert rows(shard_collections) == expected_rows[kinds[-1]]


def test_passage_and_document_may_share_name() -> None:
    shard_collections = collections()
    shard_collections.apply([document("a#0", 1, vector=V), text("a", 2)])
    shard_collections.apply_passages([passages("a", "x", offset=2, read_to=3)])
    assert len(shard_collections.indexes["c"]) == 2
    shard_collections.apply([deletion("a", 4)])
    assert len(shard_collections.indexes["c"]) == 1


def test_collection_accepts_one_embedder() -> None:
    shard_collections = collections()
    shard_collections.apply([text("a", 1), text("b", 2)])
    shard_collections.apply_passages([passages("a", "x", offset=1)])
    ((change, error),) = shard_collections.apply_passages(
        [passages("b", "x", offset=2, embedder="other@2")]
    )
    assert change.document_id == "b" and isinstance(error, InvalidVector)
    assert "embedded by hash@1, found passages by other@2" in error.message
    assert len(shard_collections.apply_passages([passages("b", "x", offset=2, embedder="")])) == 1
    with pytest.raises(InvalidVector, match=r"embedded by hash@1, found a vector by other@2"):
        shard_collections.check_embedder("c", "other@2")
    shard_collections.check_embedder("c", "hash@1")
    shard_collections.check_embedder("c", "")
    shard_collections.check_embedder("unknown", "other@2")
    shard_collections.declare("c", declared(embedder="other@2", at_ms=5))
    assert rows(shard_collections) == set(), "what another model made cannot be searched"
    late = passages("a", "x", offset=1, read_to=9, at_ms=4)
    assert shard_collections.apply_passages([late]) == [], "made before: nobody's fault"
    assert (
        len(shard_collections.apply_passages([passages("a", "x", offset=1, read_to=9, at_ms=6)]))
        == 1
    )
    assert (
        shard_collections.apply_passages([passages("a", "x", offset=1, embedder="other@2")]) == []
    )
    assert rows(shard_collections) == {"a#0"}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"chunks": (Chunk(text="", start=0, vector=b"\0\0\xc0\x7f" * 8),)}, "finite"),
        ({"chunks": (Chunk(text="x", start=0, vector=bytes(12)),)}, "vectors of 8 values"),
        ({"metadata": "[1]"}, "expected a JSON object"),
        ({"metadata": '{"$tenant": "x"}'}, "no name for a field"),
        ({"metadata": '{"deep": {}}'}, "expected a text, a number"),
    ],
)
def test_unusable_passages_are_rejected_alone(fields: Any, error: str) -> None:
    shard_collections = collections()
    shard_collections.apply([text(name, 1) for name in "abc"])
    shard_collections.apply_passages([passages("c", "old", "older", offset=1, read_to=9)])
    wrong = PassagesChange("c", "c", record("c", "x", offset=1, **fields), 9)
    good = [passages(name, "x", offset=1, read_to=9) for name in "ab"]
    ((change, refusal),) = shard_collections.apply_passages([good[0], wrong, good[1]])
    assert change is wrong and isinstance(refusal, InvalidRequest | InvalidVector | WrongDimension)
    assert error in refusal.message
    assert rows(shard_collections) == {"a#0", "b#0", "c#0", "c#1"}, "its old ones stay"


def test_empty_names_leave_no_state() -> None:
    shard_collections = collections()
    for number in range(50):
        name = f"n{number}"
        shard_collections.apply([deletion("a", 1, collection=name)])
        shard_collections.apply_passages([no_passages("a", collection=name)])
        shard_collections.apply([text("a", 2, collection=name)])
        assert shard_collections.stores[name].words._state.index is None
        shard_collections.apply([deletion("a", 3, collection=name)])
    assert shard_collections.stores == {} == shard_collections.indexes
    shard_collections.apply([document(f"d{number}", number, vector=V) for number in range(50)])
    assert shard_collections.stores["c"]._floors == {}, "nor do documents that were never text"


def test_passage_store_lists_texts_without_passages() -> None:
    shard_collections = collections()
    shard_collections.apply([text("a", 1), text("b", 2), text("c", 3)])
    shard_collections.apply_passages(
        [passages("a", "x", offset=1, read_to=9), passages("b", offset=2)]
    )
    assert shard_collections.stores["c"].waiting() == ["b", "c"]
    shard_collections.apply([deletion("c", 4)])
    assert shard_collections.stores["c"].waiting() == ["b"]


def test_missing_and_foreign_collections_give_same_error() -> None:
    shard_collections = collections()
    for name in ("c", "open"):
        shard_collections.apply([document("a", 1, vector=V, collection=name)])
    shard_collections.declare("c", declared(tenants=["t1"]))
    assert (
        shard_collections.get("c", "t1")
        is shard_collections.get("c")
        is shard_collections.indexes["c"]
    )
    errors = []
    for name in ("c", "d"):
        with pytest.raises(Exception, match="there are: open$") as raised:
            shard_collections.get(name, "t2")
        errors.append((type(raised.value), str(raised.value).replace(repr(name), "_")))
    assert errors[0] == errors[1]
    shard_collections.declare("c", None)
    assert shard_collections.get("c", "t2")
    for number in itertools.count():
        try:
            shard_collections.declare(f"n{number}", declared(f"n{number}"))
        except InvalidRequest as error:
            assert number == 10_000 and "take some back" in error.message
            return
