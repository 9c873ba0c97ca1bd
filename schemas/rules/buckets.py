"""Counts times in histograms, by rising upper bounds.

The writers of counts and the processes that show them use the same bounds from here. Counts by
other bounds, of another version, are not shown.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

SEARCH_MS = (0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000)


class Buckets:
    """Counts of times up to each of `bounds`, and of longer times."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


def cumulative_counts(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return for each bound, and in total, how many values were at most that, as in Prometheus."""
    labels = [*map(str, bounds), "+Inf"]
    return list(zip(labels, map(float, accumulate(counts)), strict=True))
