"""When a pool follows what it wants: up soon, down late, never to and fro.

A pool grows to the least that was wanted all through `up_after_ms`, and shrinks to the most that
was wanted during `down_after_ms`. So a moment's need starts nothing, and a lull ends nothing.
Pure: time is an argument.
"""

from collections import deque
from collections.abc import Mapping

from infra.scaling.settings import ScalingSettings
from schemas.records import Role

Counts = Mapping[Role, int]


class Steady:
    """What was wanted lately."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._seen: deque[tuple[int, Counts]] = deque()

    def settle(self, wanted: Counts, present: Counts, now_ms: int) -> dict[Role, int]:
        """How many workers each pool is to have, from what is wanted now and was before."""
        settings, seen = self._settings, self._seen
        while seen and seen[-1][0] > now_ms:  # the clock was set back: nothing is known of then
            seen.pop()
        seen.append((now_ms, wanted))
        kept_ms = max(settings.down_after_ms, settings.up_after_ms)
        while len(seen) > 1 and seen[1][0] <= now_ms - kept_ms:
            seen.popleft()
        return {role: self._one(role, present.get(role, 0), now_ms) for role in wanted}

    def _one(self, role: Role, present: int, now_ms: int) -> int:
        least = min(self._since(role, now_ms - self._settings.up_after_ms), default=present)
        most = max(self._since(role, now_ms - self._settings.down_after_ms), default=present)
        if least > present:
            return least
        return min(most, present)

    def _since(self, role: Role, from_ms: int) -> list[int]:
        """What was wanted from then on; nothing where that is not known."""
        before = [wanted for at_ms, wanted in self._seen if at_ms <= from_ms]
        after = [wanted for at_ms, wanted in self._seen if at_ms > from_ms]
        known = [*before[-1:], *after]
        if not before or not all(role in wanted for wanted in known):
            return []
        return [wanted[role] for wanted in known]
