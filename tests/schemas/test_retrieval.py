"""Shards of documents, layouts of the fleet, and the merge of what shards found."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import (
    DeadlineExceeded,
    EmptyIndex,
    InvalidVector,
    QueueFull,
    RecordError,
    TriviumError,
    UnknownCollection,
    WrongDimension,
)
from schemas.fleet import LEASE_MS, FleetView
from schemas.records import (
    Heartbeat,
    Hits,
    Load,
    MemberKind,
    MemberState,
    Quoted,
    Registration,
    Role,
    SearchCapability,
    SearchLoad,
)
from schemas.retrieval import (
    layout_of,
    merge_hits,
    pack_vector,
    partitions_at,
    shard_of,
    unpack_vector,
)

NOWHERE: Mapping[str, tuple[str, list[int]]] = {}


def hits(shard: int, shards: int = 2, **fields: Any) -> Hits:
    found: dict[str, float] = fields.pop("found", {})
    return Hits(
        retrieval_id="q",
        request_id="",
        worker_id=f"w{shard}",
        shard=shard,
        shards=shards,
        collection="c",
        document_ids=tuple(found),
        distances=pack_vector(list(found.values())),
        at_ms=0,
        **fields,
    )


def refused(shard: int, error: TriviumError, shards: int = 2) -> Hits:
    return hits(shard, shards, error=error.to_wire())


def fleet(
    *workers: tuple[str, int, int, MemberState], at: Mapping[str, tuple[str, list[int]]] = NOWHERE
) -> FleetView:
    """`at` says of workers where they are, and which partitions they answer."""
    view = FleetView()
    for offset, (name, shard, shards, state) in enumerate(workers):
        place, partitions = at.get(name, ("", []))
        part = SearchCapability(shard=shard, shards=shards, backend="cpu", slots=8, place=place)
        view.apply(
            Registration(
                member_id=name,
                epoch=1,
                kind=MemberKind.WORKER,
                roles=(Role.RETRIEVAL,),
                started_ms=0,
                search=part,
            ),
            offset,
            now_ms=0,
        )
        beat = Heartbeat(
            member_id=name, epoch=1, seq=1, at_ms=0, state=state, load=Load(),
            search=SearchLoad(partitions=partitions),
        )  # fmt: skip
        view.apply(beat, offset, now_ms=0)
    return view


def test_vectors_cross_as_little_endian_floats() -> None:
    assert pack_vector([1, -2.5]) == bytes.fromhex("0000803f000020c0")
    assert pack_vector(np.array([[1, -2.5]], np.float16)) == pack_vector([1, -2.5])
    assert unpack_vector(pack_vector([1, -2.5])).tolist() == [1, -2.5]
    with pytest.raises(RecordError, match="multiple of 4 bytes, found 5"):
        unpack_vector(b"12345")
    with pytest.raises(InvalidVector, match="expected numbers, found 'word'"):
        pack_vector("word")


def test_a_document_never_changes_its_shard() -> None:
    assert [shard_of(f"document-{i}", 3) for i in range(8)] == [2, 1, 1, 0, 1, 2, 1, 2]


def test_the_layout_is_what_ready_workers_serve() -> None:
    ready, starting = MemberState.READY, MemberState.STARTING
    assert layout_of(fleet(), 0).shards == 0
    view = fleet(("a", 0, 2, ready), ("b", 1, 2, starting), ("c", 0, 2, ready))
    assert (layout_of(view, 0).shards, layout_of(view, 0).living) == (2, frozenset({0}))
    assert layout_of(view, LEASE_MS + 1).living == set()
    view = fleet(("a", 0, 1, ready), ("b", 0, 2, ready))
    assert layout_of(view, 0).shards == 1, "two shards are not whole yet"
    view = fleet(("a", 0, 1, ready), ("b", 0, 2, ready), ("c", 1, 2, ready))
    assert layout_of(view, 0).shards == 2


def test_a_place_answers_the_partitions_that_all_of_its_shards_do() -> None:
    ready, starting = MemberState.READY, MemberState.STARTING
    one = fleet(
        ("a", 0, 1, ready), ("b", 0, 1, ready), ("c", 0, 1, starting),
        at={"a": ("here", [0, 2]), "b": ("there", [1, 3]), "c": ("here", [1])},
    )  # fmt: skip
    assert partitions_at(one, "here", 0) == {0, 2} and partitions_at(one, "there", 0) == {1, 3}
    assert partitions_at(one, "elsewhere", 0) == set()
    assert partitions_at(one, "here", LEASE_MS + 1) == set() == partitions_at(fleet(), "here", 0)
    two = fleet(
        ("a", 0, 2, ready), ("b", 1, 2, ready), ("c", 1, 2, ready),
        at={"a": ("here", [0, 1]), "b": ("here", [1, 2]), "c": ("there", [0, 3])},
    )  # fmt: skip
    assert partitions_at(two, "here", 0) == {1}
    assert partitions_at(two, "there", 0) == set(), "it has half of the rows"


def test_the_nearest_of_all_shards_are_kept() -> None:
    one = hits(0, found={"a": 0.5, "c": 2.0}, exact=True, extends=3, distances_computed=10)
    two = hits(1, found={"b": 0.5, "d": 1.0}, exact=True, extends=5, distances_computed=7)
    found = merge_hits("q", {1: two, 0: one}, 2, k=3)
    assert [(hit.document_id, hit.distance) for hit in found.hits] == [
        ("a", 0.5),
        ("b", 0.5),
        ("d", 1.0),
    ]
    assert (found.extends, found.distances_computed) == (5, 17)
    assert found.is_complete and found.exact


@given(st.lists(st.dictionaries(st.text(max_size=3), st.floats(0, 9, width=16)), min_size=1))
def test_the_merge_is_that_of_one_shard(shards: list[dict[str, float]]) -> None:
    answers = {i: hits(i, len(shards), found=found) for i, found in enumerate(shards)}
    found = merge_hits("q", answers, len(shards), k=5)
    everything = sorted((d, name) for shard in shards for name, d in shard.items())
    assert [(hit.distance, hit.document_id) for hit in found.hits] == everything[:5]


def test_a_silent_or_refusing_shard_is_named() -> None:
    good = hits(0, found={"a": 1.0}, exact=True)
    found = merge_hits("q", {0: good}, 2, k=1)
    assert set(found.missing) == {1} and found.missing[1].code == DeadlineExceeded.code
    assert not found.is_complete and not found.exact
    found = merge_hits("q", {0: good, 1: refused(1, QueueFull("full"))}, 2, k=1)
    assert found.missing[1].code == QueueFull.code


def test_a_shard_with_nothing_is_not_missing() -> None:
    good = hits(0, found={"a": 1.0}, exact=True)
    for error in (UnknownCollection("no c"), EmptyIndex("empty")):
        found = merge_hits("q", {0: good, 1: refused(1, error)}, 2, k=1)
        assert found.is_complete and found.exact


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ({}, DeadlineExceeded),
        ({0: UnknownCollection("no c"), 1: UnknownCollection("no c")}, UnknownCollection),
        ({0: UnknownCollection("no c")}, DeadlineExceeded),
        ({0: UnknownCollection("no c"), 1: WrongDimension("3")}, WrongDimension),
        ({1: WrongDimension("3")}, WrongDimension),
    ],
)
def test_where_no_shard_searched_the_reason_is_raised(
    errors: dict[int, TriviumError], raised: type[TriviumError]
) -> None:
    with pytest.raises(raised):
        merge_hits("q", {shard: refused(shard, error) for shard, error in errors.items()}, 2, k=1)


def test_quoted_documents_that_changed_are_those_that_their_own_shards_name() -> None:
    """What cannot be checked is not trusted."""
    names = [f"d{number}" for number in range(20)]
    quoted = [Quoted(document_id=each, content="1") for each in names]
    of_shard = [[each for each in names if shard_of(each, 2) == shard] for shard in range(2)]
    one, two = of_shard
    assert one and two
    good = hits(0, found={"a": 1.0}, changed=(one[0], two[0], "other"))
    whole = {0: good, 1: hits(1, found={})}
    assert merge_hits("q", whole, 2, k=1, quoted=quoted).changed == {one[0]}
    assert merge_hits("q", {0: good}, 2, k=1, quoted=quoted).changed == {one[0], *two}
    broken = {0: good, 1: refused(1, QueueFull("full"))}
    assert merge_hits("q", broken, 2, k=1, quoted=quoted).changed == {one[0], *two}
    empty = {0: good, 1: replace(refused(1, EmptyIndex("none")), changed=(two[1],))}
    assert merge_hits("q", empty, 2, k=1, quoted=quoted).changed == {one[0], two[1]}
    assert merge_hits("q", whole, 2, k=1).changed == frozenset()
