"""Means over the last seconds of what is seen now and then. Pure: passed time is an argument."""

from collections.abc import Hashable
from math import exp
from typing import Generic, TypeVar

MEMORY_MS = 10_000.0  # as routers' own, over rates
Key = TypeVar("Key", bound=Hashable)


class Means(Generic[Key]):
    """One for each key; what was seen so long ago counts for little."""

    def __init__(self, memory_ms: float = MEMORY_MS) -> None:
        self._memory_ms = memory_ms
        self._known: dict[Key, float] = {}

    def seen(self, key: Key, value: float, passed_ms: float) -> float:
        """The mean with this value, so long after the last one; the first is the mean."""
        known = self._known.get(key, value)
        fresh = 1 - exp(-max(0.0, passed_ms) / self._memory_ms)
        self._known[key] = known + fresh * (value - known)
        return self._known[key]
