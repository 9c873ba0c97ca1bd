"""Reciprocal ranks: the sum over lists, and which hits of a shard may be left out."""

from hypothesis import given
from hypothesis import strategies as st

from schemas.rules.ranks import DEPTH_MIN, candidates, depth_of, fuse_ranks

LISTS = st.tuples(*[st.lists(st.integers(0, 12).map(str), unique=True) for _ in range(4)])


def test_fuse_ranks_sums_reciprocal_ranks() -> None:
    assert fuse_ranks((["a", "b"], ["b", "c"])) == {
        "b": 1 / 62 + 1 / 61, "a": 1 / 61, "c": 1 / 62
    }  # fmt: skip
    assert list(fuse_ranks((["z", "y"], ["y", "z"]))) == ["z", "y"], "equal ones by the first list"
    assert list(fuse_ranks((["b"], ["a"]))) == ["b", "a"], "equal ones by the first list"
    assert fuse_ranks(()) == {} and fuse_ranks(([], [])) == {}


def test_depth_of_is_at_least_minimum() -> None:
    assert depth_of(1) == DEPTH_MIN and depth_of(DEPTH_MIN + 1) == DEPTH_MIN + 1


@given(LISTS, st.integers(1, 4))
def test_candidates_of_shards_include_best_of_merge(lists: tuple[list[str], ...], k: int) -> None:
    """Each id is on one shard; merges keep the order of both shards' lists."""
    first_lists, second_lists = (
        [[f"{shard}{suffix}" for suffix in lists[2 * shard + at]] for at in range(2)]
        for shard in range(2)
    )
    for turn in range(2):
        whole = [
            _merged(first_lists[at], second_lists[at], first=(at + turn) % 2) for at in range(2)
        ]
        best = list(fuse_ranks(whole))[:k]
        picks = {
            *candidates(first_lists[0], first_lists[1], k),
            *candidates(second_lists[0], second_lists[1], k),
        }
        assert picks.issuperset(best)


def _merged(first_list: list[str], second_list: list[str], first: int) -> list[str]:
    return [*first_list, *second_list] if first == 0 else [*second_list, *first_list]


def test_candidates_shorten_long_lists() -> None:
    by_vector, by_words = [f"a{n}" for n in range(50)], [f"b{n}" for n in range(50)]
    assert candidates(by_vector, by_words, 2) == ["a0", "b0", "a1", "b1"]
    assert candidates(by_vector, by_vector, 3) == by_vector[:3]
    assert len(candidates(by_vector, by_vector[::-1], 1)) == 50, "each is the best of some merge"
