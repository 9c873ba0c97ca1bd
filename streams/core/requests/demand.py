"""Measures the demand of the last seconds: the rate of requests, and the work of each.

Averages decay: an event `MEMORY_MS` ago counts for a third (1/e). They decide nothing about
requests: `streams/core/handlers/backlog.py` reports them to the fleet, and `infra/scaling` computes
from them how many workers are needed.
"""

from math import exp

MEMORY_MS = 10_000.0


class DecayingSums:
    """Sums that decay with time; the first one counts events."""

    __slots__ = ("_at_ms", "_since_ms", "_sums")

    def __init__(self, *names: str) -> None:
        self._sums = dict.fromkeys(("count", *names), 0.0)
        self._at_ms = self._since_ms = 0

    def add(self, now_ms: int, **values: float) -> None:
        """Count one more event, with its values."""
        decay = self._decay(now_ms)
        self._at_ms = max(self._at_ms, now_ms)
        self._since_ms = self._since_ms or now_ms
        values["count"] = 1.0
        self._sums = {name: decay * total + values[name] for name, total in self._sums.items()}

    def per_s(self, now_ms: int) -> float:
        """Return events per second; the first seconds are extrapolated, as if never different."""
        counted = self._decay(now_ms) * self._sums["count"]
        covered_share = 1 - exp(-max(1_000, now_ms - self._since_ms) / MEMORY_MS)
        return counted * 1_000 / MEMORY_MS / covered_share

    def mean(self, name: str) -> float:
        """Return the mean of one value; 0 if no event was counted."""
        count = self._sums["count"]
        return self._sums[name] / count if count else 0.0

    def _decay(self, now_ms: int) -> float:
        return exp(min(0, self._at_ms - now_ms) / MEMORY_MS)


class Demand:
    """Sums of the requests that were queued, placed and answered."""

    def __init__(self) -> None:
        self.queued = DecayingSums("prompt_tokens")
        self.placed = DecayingSums("prefill_ms", "append_ms")
        self.answered = DecayingSums("answer_tokens")
