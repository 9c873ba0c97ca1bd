"""What the requests of the last seconds ask of workers: how many come, what each of them takes.

Averages that forget: what lies `MEMORY_MS` back counts for a third. No request is decided by them:
`streams/core/handlers/backlog.py` tells them to the fleet, and `infra/scaling` says from that how
many workers are wanted.
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
        """How many came; in the first seconds, as if it had always been so."""
        counted = self._decay(now_ms) * self._sums["count"]
        covered_share = 1 - exp(-max(1_000, now_ms - self._since_ms) / MEMORY_MS)
        return counted * 1_000 / MEMORY_MS / covered_share

    def mean(self, name: str) -> float:
        """Return the mean of one value; 0 where nothing was counted."""
        count = self._sums["count"]
        return self._sums[name] / count if count else 0.0

    def _decay(self, now_ms: int) -> float:
        return exp(min(0, self._at_ms - now_ms) / MEMORY_MS)


class Demand:
    """What came to the queue, what was placed, and what was answered."""

    def __init__(self) -> None:
        self.queued = DecayingSums("prompt_tokens")
        self.placed = DecayingSums("prefill_ms", "append_ms")
        self.answered = DecayingSums("answer_tokens")
