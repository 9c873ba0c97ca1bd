"""When a pool follows its wanted size: it grows soon, shrinks late and does not oscillate.

A pool grows to the least count that was wanted throughout `up_after_ms`, and shrinks to the largest
count that was wanted during `down_after_ms`. So a short peak starts no worker, and a short lull
stops none. Pure: time is an argument.
"""

from collections import deque
from collections.abc import Mapping

from infra.scaling.settings import ScalingSettings
from schemas.records import Role

Counts = Mapping[Role, int]


class PoolHysteresis:
    """Grows pools soon and shrinks them late, from recent wanted counts."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._history: deque[tuple[int, Counts]] = deque()

    def settle(self, wanted_counts: Counts, present: Counts, now_ms: int) -> dict[Role, int]:
        """Return the target size of each pool, from the counts that are wanted now and were
        before."""
        settings, history = self._settings, self._history
        while (
            history and history[-1][0] > now_ms
        ):  # the clock was set back: these times are in the future
            history.pop()
        history.append((now_ms, wanted_counts))
        memory_ms = max(settings.down_after_ms, settings.up_after_ms)
        while len(history) > 1 and history[1][0] <= now_ms - memory_ms:
            history.popleft()
        return {
            role: self._settle_role(role, present.get(role, 0), now_ms) for role in wanted_counts
        }

    def _settle_role(self, role: Role, present: int, now_ms: int) -> int:
        lowest = min(self._since(role, now_ms - self._settings.up_after_ms), default=present)
        highest = max(self._since(role, now_ms - self._settings.down_after_ms), default=present)
        if lowest > present:
            return lowest
        return min(highest, present)

    def _since(self, role: Role, from_ms: int) -> list[int]:
        """Return the counts wanted since a time; an empty list if the history is too short."""
        before = [counts for at_ms, counts in self._history if at_ms <= from_ms]
        after = [counts for at_ms, counts in self._history if at_ms > from_ms]
        window = [*before[-1:], *after]
        if not before or not all(role in counts for counts in window):
            return []
        return [counts[role] for counts in window]
