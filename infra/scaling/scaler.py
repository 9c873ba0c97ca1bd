"""Plans how many workers each pool wants, and with hysteresis, how many it gets.

A pool grows to the least count that was wanted throughout `up_after_ms`, and shrinks to the largest
count that was wanted during `down_after_ms`. So a short peak starts no worker, and a short lull
stops none. Pure: time is an argument.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from infra.scaling.fleet_meter import FleetMeter
from infra.scaling.policy import wanted_pools
from infra.scaling.pools import PoolKey
from infra.scaling.settings import ScalingSettings
from schemas.fleet import FleetView
from schemas.records import Backlog, WantedPool

_NEWEST = 0.5  # weight of the last start in the mean start time
Counts = Mapping[PoolKey, int]


class PoolHysteresis:
    """Grows pools soon and shrinks them late, from recent wanted counts."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._history: deque[tuple[int, Counts]] = deque()

    def settle(self, wanted_counts: Counts, present: Counts, now_ms: int) -> dict[PoolKey, int]:
        """Return the target size of each pool, from the counts that are wanted now and were
        before."""
        settings, history = self._settings, self._history
        # Where the clock was set back, these times are in the future.
        while history and history[-1][0] > now_ms:
            history.pop()
        history.append((now_ms, wanted_counts))
        memory_ms = max(settings.down_after_ms, settings.up_after_ms)
        while len(history) > 1 and history[1][0] <= now_ms - memory_ms:
            history.popleft()
        return {
            pool: self._settle_pool(pool, present.get(pool, 0), now_ms) for pool in wanted_counts
        }

    def _settle_pool(self, pool: PoolKey, present: int, now_ms: int) -> int:
        lowest = min(self._since(pool, now_ms - self._settings.up_after_ms), default=present)
        highest = max(self._since(pool, now_ms - self._settings.down_after_ms), default=present)
        if lowest > present:
            return lowest
        return min(highest, present)

    def _since(self, pool: PoolKey, from_ms: int) -> list[int]:
        """Return the counts wanted since a time; an empty list if the history is too short."""
        before = [counts for at_ms, counts in self._history if at_ms <= from_ms]
        after = [counts for at_ms, counts in self._history if at_ms > from_ms]
        window = [*before[-1:], *after]
        if not before or not all(pool in counts for counts in window):
            return []
        return [counts[pool] for counts in window]


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """The fleet's backlogs by model, and the workers that each pool wants."""

    backlogs: list[Backlog]
    pools: list[WantedPool]

    @property
    def counts(self) -> dict[PoolKey, int]:
        """Return the workers that each pool wants."""
        return {PoolKey(pool.role, pool.model): pool.workers for pool in self.pools}


class Scaler:
    """Plans how many workers each pool gets; call it about once a second."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._meter = FleetMeter()
        self._hysteresis = PoolHysteresis(settings)
        self._start_ms: float | None = None  # mean of measured starts; None: no start was measured

    def record_start(self, took_ms: float) -> None:
        """Record the time that a worker took to start. The policy looks this far ahead, in place of
        the setting."""
        mean_ms = took_ms if self._start_ms is None else self._start_ms
        self._start_ms = mean_ms + _NEWEST * (took_ms - mean_ms)

    @property
    def start_ms(self) -> int:
        """Return the measured time of a worker's start, or else the setting."""
        return self._settings.start_ms if self._start_ms is None else round(self._start_ms)

    def plan(self, view: FleetView, now_ms: int) -> ScalingPlan | None:
        """Return the plan for now; None if no live router reports a backlog."""
        measured = self._meter.measure(view, now_ms)
        if measured is None:
            return None
        targets = replace(self._settings, start_ms=self.start_ms)
        backlogs = [model.backlog for model in measured.models]
        return ScalingPlan(backlogs, wanted_pools(measured, targets))

    def settle(self, plan: ScalingPlan, present: Counts, now_ms: int) -> dict[PoolKey, int]:
        """Return the target size of each pool in the plan.

        If the targets exceed `workers_max` together, pools release at once what they no longer
        want.
        """
        targets = self._hysteresis.settle(plan.counts, present, now_ms)
        llm = [pool for pool in targets if pool.is_llm]
        excess = sum(targets[pool] for pool in llm) - self._settings.workers_max
        for pool in llm:
            surplus = min(excess, targets[pool] - plan.counts[pool])
            if surplus > 0:
                targets[pool] -= surplus
                excess -= surplus
        return targets
