"""Exponential moving averages over the last seconds. Pure: elapsed time is an argument."""

from collections.abc import Hashable
from math import exp
from typing import Generic, TypeVar

MEMORY_MS = 10_000.0  # the window over which routers average their rates
Key = TypeVar("Key", bound=Hashable)


class Ewma(Generic[Key]):
    """Exponential moving averages, one for each key."""

    def __init__(self, memory_ms: float = MEMORY_MS) -> None:
        self._memory_ms = memory_ms
        self._means: dict[Key, float] = {}

    def update(self, key: Key, value: float, passed_ms: float) -> float:
        """Add a value measured `passed_ms` after the last one, and return the new mean."""
        mean = self._means.get(key, value)
        fresh = 1 - exp(-max(0.0, passed_ms) / self._memory_ms)
        self._means[key] = mean + fresh * (value - mean)
        return self._means[key]
