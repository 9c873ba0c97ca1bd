"""Layouts of the fleet, and the merge of what shards found."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import (
    DeadlineExceeded,
    EmptyIndex,
    QueueFull,
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
from schemas.retrieval import pack_vector, shard_of
from streams.log.retrieval.results import layout_of, merge_hits, partitions_at

NOWHERE: Mapping[str, tuple[str, list[int]]] = {}


def hits(shard: int, shards: int = 2, **fields: Any) -> Hits:
    distances_by_id: dict[str, float] = fields.pop("found", {})
    return Hits(
        retrieval_id="q",
        request_id="",
        worker_id=f"w{shard}",
        shard=shard,
        shards=shards,
        collection="c",
        document_ids=tuple(distances_by_id),
        distances=pack_vector(list(distances_by_id.values())),
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


def test_layout_follows_ready_workers() -> None:
    ready, starting = MemberState.READY, MemberState.STARTING
    assert layout_of(fleet(), 0).shards == 0
    view = fleet(("a", 0, 2, ready), ("b", 1, 2, starting), ("c", 0, 2, ready))
    assert (layout_of(view, 0).shards, layout_of(view, 0).living) == (2, frozenset({0}))
    assert layout_of(view, LEASE_MS + 1).living == set()
    view = fleet(("a", 0, 1, ready), ("b", 0, 2, ready))
    assert layout_of(view, 0).shards == 1, "two shards are not whole yet"
    view = fleet(("a", 0, 1, ready), ("b", 0, 2, ready), ("c", 1, 2, ready))
    assert layout_of(view, 0).shards == 2


def test_place_answers_partitions_common_to_all_its_shards() -> None:
    ready, starting = MemberState.READY, MemberState.STARTING
    one_shard = fleet(
        ("a", 0, 1, ready), ("b", 0, 1, ready), ("c", 0, 1, starting),
        at={"a": ("here", [0, 2]), "b": ("there", [1, 3]), "c": ("here", [1])},
    )  # fmt: skip
    assert partitions_at(one_shard, "here", 0) == {0, 2} and partitions_at(
        one_shard, "there", 0
    ) == {1, 3}
    assert partitions_at(one_shard, "elsewhere", 0) == set()
    assert (
        partitions_at(one_shard, "here", LEASE_MS + 1) == set() == partitions_at(fleet(), "here", 0)
    )
    two_shards = fleet(
        ("a", 0, 2, ready), ("b", 1, 2, ready), ("c", 1, 2, ready),
        at={"a": ("here", [0, 1]), "b": ("here", [1, 2]), "c": ("there", [0, 3])},
    )  # fmt: skip
    assert partitions_at(two_shards, "here", 0) == {1}
    assert partitions_at(two_shards, "there", 0) == set(), "it has half of the rows"


def test_merge_keeps_nearest_hits_of_all_shards() -> None:
    first = hits(0, found={"a": 0.5, "c": 2.0}, exact=True, extends=3, distances_computed=10)
    second = hits(1, found={"b": 0.5, "d": 1.0}, exact=True, extends=5, distances_computed=7)
    result = merge_hits("q", {1: second, 0: first}, 2, k=3)
    assert [(hit.document_id, hit.distance) for hit in result.hits] == [
        ("a", 0.5),
        ("b", 0.5),
        ("d", 1.0),
    ]
    assert (result.extends, result.distances_computed) == (5, 17)
    assert result.is_complete and result.exact


@given(st.lists(st.dictionaries(st.text(max_size=3), st.floats(0, 9, width=16)), min_size=1))
def test_merge_matches_search_on_one_shard(shards: list[dict[str, float]]) -> None:
    answers = {i: hits(i, len(shards), found=distances) for i, distances in enumerate(shards)}
    result = merge_hits("q", answers, len(shards), k=5)
    everything = sorted((d, name) for shard in shards for name, d in shard.items())
    assert [(hit.distance, hit.document_id) for hit in result.hits] == everything[:5]


def test_merge_names_silent_and_refusing_shards() -> None:
    good = hits(0, found={"a": 1.0}, exact=True)
    result = merge_hits("q", {0: good}, 2, k=1)
    assert set(result.missing) == {1} and result.missing[1].code == DeadlineExceeded.code
    assert not result.is_complete and not result.exact
    result = merge_hits("q", {0: good, 1: refused(1, QueueFull("full"))}, 2, k=1)
    assert result.missing[1].code == QueueFull.code


def test_merge_does_not_count_empty_shard_as_missing() -> None:
    good = hits(0, found={"a": 1.0}, exact=True)
    for error in (UnknownCollection("no c"), EmptyIndex("empty")):
        result = merge_hits("q", {0: good, 1: refused(1, error)}, 2, k=1)
        assert result.is_complete and result.exact


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
def test_merge_raises_reason_when_no_shard_searched(
    errors: dict[int, TriviumError], raised: type[TriviumError]
) -> None:
    with pytest.raises(raised):
        merge_hits("q", {shard: refused(shard, error) for shard, error in errors.items()}, 2, k=1)


def test_merge_reports_quoted_documents_changed_on_their_own_shard() -> None:
    """A document that cannot be checked counts as changed."""
    names = [f"d{number}" for number in range(20)]
    quoted = [Quoted(document_id=name, content="1") for name in names]
    of_shard = [[name for name in names if shard_of(name, 2) == shard] for shard in range(2)]
    first_ids, second_ids = of_shard
    assert first_ids and second_ids
    good = hits(0, found={"a": 1.0}, changed=(first_ids[0], second_ids[0], "other"))
    whole = {0: good, 1: hits(1, found={})}
    assert merge_hits("q", whole, 2, k=1, quoted=quoted).changed == {first_ids[0]}
    assert merge_hits("q", {0: good}, 2, k=1, quoted=quoted).changed == {first_ids[0], *second_ids}
    broken = {0: good, 1: refused(1, QueueFull("full"))}
    assert merge_hits("q", broken, 2, k=1, quoted=quoted).changed == {first_ids[0], *second_ids}
    empty = {0: good, 1: replace(refused(1, EmptyIndex("none")), changed=(second_ids[1],))}
    assert merge_hits("q", empty, 2, k=1, quoted=quoted).changed == {first_ids[0], second_ids[1]}
    assert merge_hits("q", whole, 2, k=1).changed == frozenset()
