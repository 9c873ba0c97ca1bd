"""Reciprocal ranks: the sum over lists, and which hits of a shard may be left out."""

from hypothesis import given
from hypothesis import strategies as st

from schemas.rules.ranks import DEPTH_MIN, candidates, depth_of, fuse_ranks

LISTS = st.tuples(*[st.lists(st.integers(0, 12).map(str), unique=True) for _ in range(4)])


def test_scores_are_sums_of_reciprocal_ranks() -> None:
    assert fuse_ranks((["a", "b"], ["b", "c"])) == {
        "b": 1 / 62 + 1 / 61, "a": 1 / 61, "c": 1 / 62
    }  # fmt: skip
    assert list(fuse_ranks((["z", "y"], ["y", "z"]))) == ["z", "y"], "equal ones by the first list"
    assert list(fuse_ranks((["b"], ["a"]))) == ["b", "a"], "equal ones by the first list"
    assert fuse_ranks(()) == {} and fuse_ranks(([], [])) == {}


def test_lists_are_deeper_than_what_is_wanted_of_them() -> None:
    assert depth_of(1) == DEPTH_MIN and depth_of(DEPTH_MIN + 1) == DEPTH_MIN + 1


@given(LISTS, st.integers(1, 4))
def test_no_shard_leaves_out_what_is_among_the_best_of_all(
    lists: tuple[list[str], ...], k: int
) -> None:
    """Ids are of one shard each; both shards' lists are merged in any order that keeps theirs."""
    one, two = (
        [[f"{shard}{each}" for each in lists[2 * shard + at]] for at in range(2)]
        for shard in range(2)
    )
    for turn in range(2):
        whole = [_merged(one[at], two[at], first=(at + turn) % 2) for at in range(2)]
        best = list(fuse_ranks(whole))[:k]
        kept = {*candidates(one[0], one[1], k), *candidates(two[0], two[1], k)}
        assert kept.issuperset(best)


def _merged(one: list[str], two: list[str], first: int) -> list[str]:
    return [*one, *two] if first == 0 else [*two, *one]


def test_few_are_left_of_long_lists() -> None:
    one, other = [f"a{n}" for n in range(50)], [f"b{n}" for n in range(50)]
    assert candidates(one, other, 2) == ["a0", "b0", "a1", "b1"]
    assert candidates(one, one, 3) == one[:3]
    assert len(candidates(one, one[::-1], 1)) == 50, "each is the best of some merge"
