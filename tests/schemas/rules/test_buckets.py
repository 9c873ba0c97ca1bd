"""Counts of times by bounds."""

from schemas.rules.buckets import Buckets


def test_a_bound_belongs_to_its_bucket_and_what_is_longer_to_the_last() -> None:
    buckets = Buckets((1, 10))
    buckets.add(0.5)
    buckets.add(1)
    buckets.add(1.5, 3)
    buckets.add(11)
    assert buckets.counts == [2, 3, 1]
    assert buckets.sum == 17
