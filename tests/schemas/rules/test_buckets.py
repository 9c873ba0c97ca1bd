"""Counts of times by bounds."""

from schemas.rules.buckets import Buckets


def test_buckets_include_their_bound_and_last_takes_longer_times() -> None:
    buckets = Buckets((1, 10))
    buckets.add(0.5)
    buckets.add(1)
    buckets.add(1.5, 3)
    buckets.add(11)
    assert buckets.counts == [2, 3, 1]
    assert buckets.sum == 17
