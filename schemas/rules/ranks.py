"""How hits by vector and hits by words become one list: the rule of shards and askers alike.

Reciprocal ranks (Cormack, Clarke and Buettcher, SIGIR 2009): a hit's score is the sum of
1 / (60 + rank) over the lists that it stands in, with ranks from 1. So a distance and a BM25 score
need no common scale. Pure.
"""

from bisect import bisect_right, insort
from collections.abc import Sequence
from math import inf

RANK_OFFSET = 60  # the paper's k
DEPTH_MIN = 50  # of each list: a hit that stands low in both may beat the first of one


def depth_of(k: int) -> int:
    """How long the lists are from which k hits are fused."""
    return max(k, DEPTH_MIN)


def fuse_ranks(lists: Sequence[Sequence[str]]) -> dict[str, float]:
    """The score of each id, the best first, equal ones in order of the lists, as they are given.

    Half of all hits stand in one list alone and equal one of the other. Names say nothing of them;
    the first list is the one to trust more. No id stands twice in a list.
    """
    scores: dict[str, float] = {}
    for ids in lists:
        for rank, hit_id in enumerate(ids, 1):
            scores[hit_id] = scores.get(hit_id, 0.0) + 1 / (RANK_OFFSET + rank)
    return dict(sorted(scores.items(), key=lambda item: -item[1]))


def candidates(by_vector: Sequence[str], by_words: Sequence[str], k: int) -> list[str]:
    """Ids of a shard that may be among the k best of all shards, the best of this shard first.

    Other shards' hits come between, but never change the order within one. So what k others of the
    same shard precede in both lists is out, whatever they bring.
    """
    ranks = [{hit_id: rank for rank, hit_id in enumerate(ids)} for ids in (by_vector, by_words)]
    places = {
        hit_id: (ranks[0].get(hit_id, inf), ranks[1].get(hit_id, inf))
        for hit_id in (*by_vector, *by_words)
    }
    second_ranks: list[float] = []
    chosen_ids = set()
    for hit_id, place in sorted(places.items(), key=lambda item: item[1]):
        if bisect_right(second_ranks, place[1]) < k:
            chosen_ids.add(hit_id)
        insort(second_ranks, place[1])
    return [hit_id for hit_id in fuse_ranks((by_vector, by_words)) if hit_id in chosen_ids]
