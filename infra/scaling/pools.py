"""What is known of a pool, or of one shard of the retrieval pool. Decides nothing."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """The workers of one role, or of one shard of the retrieval pool."""

    present: int = 0  # that live and serve
    under_way: float = 0.0  # answers or searches that they hold, on average
    slots: float = 0.0  # how many of these one worker takes at once
    kv_tokens: float = 0.0  # of KV memory, on one worker; 0: unknown
    per_s: float = 0.0  # searches that they answer, together
    pace_per_s: float = 0.0  # how many one of them can; 0: unknown


def mean(values: Iterable[float]) -> float:
    """Return the mean, or 0 where there are no values."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
