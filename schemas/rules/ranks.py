"""Fuses hits by vector and hits by words into one list; shards and clients use the same rule.

Reciprocal ranks (Cormack, Clarke and Buettcher, SIGIR 2009): a hit's score is the sum of
1 / (60 + rank) over the lists that contain it, with ranks from 1. So a distance and a BM25 score
need no common scale. Pure.
"""

from bisect import bisect_right, insort
from collections.abc import Sequence
from math import inf

RANK_OFFSET = 60  # the paper's k
DEPTH_MIN = 50  # of each list: a hit with low ranks in both may beat the first of one list


def depth_of(k: int) -> int:
    """Return the length of the lists from which k hits are fused."""
    return max(k, DEPTH_MIN)


def fuse_ranks(lists: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the score of each id, the best first, equal ones in order of the given lists.

    Half of all hits are in one list only and tie with one of the other. Ids would be an arbitrary
    tie-break; the first list is the more reliable one. No list has an id twice.
    """
    scores: dict[str, float] = {}
    for ids in lists:
        for rank, hit_id in enumerate(ids, 1):
            scores[hit_id] = scores.get(hit_id, 0.0) + 1 / (RANK_OFFSET + rank)
    return dict(sorted(scores.items(), key=lambda item: -item[1]))


def candidates(by_vector: Sequence[str], by_words: Sequence[str], k: int) -> list[str]:
    """Return the ids of a shard that may be among the k best of all shards, its best ones first.

    Other shards' hits come in between, but never change the order within one shard. So an id that
    k others of the same shard precede in both lists is out, whatever the other shards have.
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
