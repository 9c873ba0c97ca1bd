"""Documents and their passages come on two topics: whatever is ahead, the end is the same."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InvalidRequest, InvalidVector, WrongDimension
from schemas.records import Chunk
from tests.workers.search.words.shelves import (
    collections,
    declared,
    document,
    gone,
    no_passages,
    passages,
    record,
    rows,
    text,
    vector_of,
)
from workers.search.words.changes import DocumentChange, PassagesChange

V = vector_of("v")


def test_all_passages_of_a_document_change_together() -> None:
    held = collections()
    held.apply([text("a", 1), text("b", 2)])
    assert held.apply_passages([passages("a", "x", "y", "z", offset=1, read_to=9)]) == []
    assert rows(held) == {"a#0", "a#1", "a#2"}
    held.apply_passages([passages("a", "w", offset=1, read_to=9), passages("b", "w", offset=2)])
    assert rows(held) == {"a#0", "b#0"}
    state = held.states()[0]
    assert (state.documents, state.passages, state.embedder) == (2, 2, "hash@1")
    held.apply_passages([passages("a", offset=1, read_to=9)])
    assert rows(held) == {"b#0"}, "an empty text has no passages"
    held.apply_passages([no_passages("b")])
    assert rows(held) == set() and held.embedder_of("c") == ""
    assert held.stores["c"].documents == held.stores["c"].passages == 0


def test_a_document_that_becomes_a_vector_and_back() -> None:
    held = collections()
    held.apply([text("a", 1)])
    held.apply_passages([passages("a", "x", "y", offset=1, read_to=2)])
    held.apply([document("a", 3, vector=V)])
    assert rows(held) == {"a"}
    assert held.apply_passages([passages("a", "x", "y", offset=1, read_to=4)]) == []
    assert rows(held) == {"a"}, "these are older"
    held.apply([text("a", 5)])
    assert rows(held) == set()
    held.apply_passages([passages("a", "x", offset=1, read_to=6)])
    assert rows(held) == set(), "older than the vector"
    held.apply_passages([no_passages("a", 6), passages("a", "z", offset=5, read_to=6)])
    assert rows(held) == {"a#0"}


def test_passages_may_be_ahead_of_their_documents() -> None:
    held = collections()
    held.apply([document("a", 1, vector=V)])
    held.apply_passages([passages("a", "x", offset=5, read_to=2)])
    assert rows(held) == {"a#0"}
    held.apply([document("a", 3, vector=V)])
    assert rows(held) == {"a#0"}, "an older vector changes nothing"
    held.apply([gone("a", 4)])
    assert rows(held) == {"a#0"}, "nor an older deletion"
    held.apply([text("a", 5)])
    assert rows(held) == {"a#0"}
    held.apply([gone("a", 6)])
    assert rows(held) == set()
    held.apply_passages([passages("a", "x", offset=5, read_to=7)])
    assert rows(held) == set(), "deleted means gone"


def test_passages_that_nobody_took_back_are_no_documents() -> None:
    """As on a log on which a slow embedding worker had the last word; a start reads it whole."""
    held = collections()
    held.apply([text("b", 3)])
    held.apply_passages([passages("a", "x", offset=1, read_to=4)])
    assert rows(held) == set()


def test_what_a_batch_passes_over_still_counts() -> None:
    for between in (gone("a", 2), document("a", 2, vector=V)):
        held = collections()
        held.apply([text("a", 1)])
        held.apply_passages([passages("a", "x", offset=1, read_to=2)])
        held.apply([text("a", 3).after(between), text("b", 4).after(None)])
        assert rows(held) == set()
        held.apply_passages([passages("a", "x", offset=1, read_to=5)])
        assert rows(held) == set()
    assert gone("a", 3).after(gone("a", 2)).floor == -1
    assert text("a", 3).after(text("a", 2).after(gone("a", 1))).floor == 1


EVENTS = st.lists(st.sampled_from(["text", "vector", "gone"]), min_size=1, max_size=6)


@given(EVENTS, st.data())
def test_any_interleaving_of_both_topics_ends_the_same(kinds: list[str], data: Any) -> None:
    documents: list[DocumentChange] = []
    embedded: list[PassagesChange] = []
    for offset, kind in enumerate(kinds):
        if kind == "text":
            documents.append(text("a", offset))
            embedded.append(passages("a", *[f"t{offset}"] * (1 + offset % 3), offset=offset))
        else:
            documents.append(
                gone("a", offset) if kind == "gone" else document("a", offset, vector=V)
            )
            embedded.append(no_passages("a"))
    held, read = collections(), 0
    waiting: list[tuple[str, Any]] = []
    order = data.draw(st.permutations(["d"] * len(documents) + ["p"] * len(embedded)))
    for topic in order:
        waiting.append((topic, documents[read] if topic == "d" else None))
        if topic == "d":
            held.apply([documents[read]])
            read += 1
        else:
            at = sum(1 for each, _ in waiting if each == "p") - 1
            found = embedded[at]
            held.apply_passages([PassagesChange("c", "a", found.passages, read)])
    last = len(kinds) - 1
    wanted = {"text": {f"a#{n}" for n in range(1 + last % 3)}, "vector": {"a"}, "gone": set()}
    assert rows(held) == wanted[kinds[-1]]


def test_a_passage_and_a_document_may_have_the_same_name() -> None:
    held = collections()
    held.apply([document("a#0", 1, vector=V), text("a", 2)])
    held.apply_passages([passages("a", "x", offset=2, read_to=3)])
    assert len(held.indexes["c"]) == 2
    held.apply([gone("a", 4)])
    assert len(held.indexes["c"]) == 1


def test_a_collection_is_bound_to_one_embedder() -> None:
    held = collections()
    held.apply([text("a", 1), text("b", 2)])
    held.apply_passages([passages("a", "x", offset=1)])
    ((change, error),) = held.apply_passages([passages("b", "x", offset=2, embedder="other@2")])
    assert change.document_id == "b" and isinstance(error, InvalidVector)
    assert "embedded by hash@1, found passages by other@2" in error.message
    assert len(held.apply_passages([passages("b", "x", offset=2, embedder="")])) == 1
    with pytest.raises(InvalidVector, match=r"embedded by hash@1, found a vector by other@2"):
        held.check_embedder("c", "other@2")
    held.check_embedder("c", "hash@1")
    held.check_embedder("c", "")
    held.check_embedder("unknown", "other@2")
    held.declare("c", declared(embedder="other@2", at_ms=5))
    assert rows(held) == set(), "what another model made cannot be searched"
    late = passages("a", "x", offset=1, read_to=9, at_ms=4)
    assert held.apply_passages([late]) == [], "made before: nobody's fault"
    assert len(held.apply_passages([passages("a", "x", offset=1, read_to=9, at_ms=6)])) == 1
    assert held.apply_passages([passages("a", "x", offset=1, embedder="other@2")]) == []
    assert rows(held) == {"a#0"}


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
def test_passages_that_cannot_be_used_are_refused_alone(fields: Any, error: str) -> None:
    held = collections()
    held.apply([text(each, 1) for each in "abc"])
    held.apply_passages([passages("c", "old", "older", offset=1, read_to=9)])
    wrong = PassagesChange("c", "c", record("c", "x", offset=1, **fields), 9)
    good = [passages(each, "x", offset=1, read_to=9) for each in "ab"]
    ((change, found),) = held.apply_passages([good[0], wrong, good[1]])
    assert change is wrong and isinstance(found, InvalidRequest | InvalidVector | WrongDimension)
    assert error in found.message
    assert rows(held) == {"a#0", "b#0", "c#0", "c#1"}, "its old ones stay"


def test_names_that_nothing_is_left_of_cost_nothing() -> None:
    held = collections()
    for number in range(50):
        name = f"n{number}"
        held.apply([gone("a", 1, collection=name)])
        held.apply_passages([no_passages("a", collection=name)])
        held.apply([text("a", 2, collection=name)])
        assert held.stores[name].words._state.index is None
        held.apply([gone("a", 3, collection=name)])
    assert held.stores == {} == held.indexes
    held.apply([document(f"d{number}", number, vector=V) for number in range(50)])
    assert held.stores["c"]._floors == {}, "nor do documents that were never text"


def test_texts_that_wait_for_passages_are_known() -> None:
    held = collections()
    held.apply([text("a", 1), text("b", 2), text("c", 3)])
    held.apply_passages([passages("a", "x", offset=1, read_to=9), passages("b", offset=2)])
    assert held.stores["c"].waiting() == ["b", "c"]
    held.apply([gone("c", 4)])
    assert held.stores["c"].waiting() == ["b"]


def test_tenants_are_told_the_same_of_what_is_not_theirs_and_of_what_is_not_there() -> None:
    held = collections()
    for name in ("c", "open"):
        held.apply([document("a", 1, vector=V, collection=name)])
    held.declare("c", declared(tenants=["t1"]))
    assert held.get("c", "t1") is held.get("c") is held.indexes["c"]
    errors = []
    for name in ("c", "d"):
        with pytest.raises(Exception, match="there are: open$") as raised:
            held.get(name, "t2")
        errors.append((type(raised.value), str(raised.value).replace(repr(name), "_")))
    assert errors[0] == errors[1]
    held.declare("c", None)
    assert held.get("c", "t2")
    for number in itertools.count():
        try:
            held.declare(f"n{number}", declared(f"n{number}"))
        except InvalidRequest as error:
            assert number == 10_000 and "take some back" in error.message
            return
