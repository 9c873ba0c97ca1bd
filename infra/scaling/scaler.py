"""Looks at the fleet and says how many workers each pool wants; with patience, how many it gets."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from infra.scaling.law import wanted
from infra.scaling.measured import LLM, Measuring
from infra.scaling.settings import ScalingSettings
from infra.scaling.steady import Steady
from schemas.fleet import FleetView
from schemas.records import Backlog, Role, WantedPool

_NEWEST = 0.5  # share of the last start in how long one takes


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen, and what follows from it."""

    backlog: Backlog
    pools: list[WantedPool]


class Scaler:
    """Ask it about once a second."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._measuring = Measuring()
        self._steady = Steady(settings)
        self._start_ms: float | None = None  # measured

    def started(self, took_ms: float) -> None:
        """A worker is there so long after it was started: from now on the law looks as far ahead,
        in place of the setting."""
        known = took_ms if self._start_ms is None else self._start_ms
        self._start_ms = known + _NEWEST * (took_ms - known)

    @property
    def start_ms(self) -> int:
        """How long a worker takes to start, as far as is known."""
        return self._settings.start_ms if self._start_ms is None else round(self._start_ms)

    def look(self, view: FleetView, now_ms: int) -> Look | None:
        """What is wanted now; nothing where no router says what waits."""
        measured = self._measuring.look(view, now_ms)
        if measured is None:
            return None
        targets = replace(self._settings, start_ms=self.start_ms)
        return Look(measured.backlog, wanted(measured, targets))

    def settle(self, look: Look, present: Mapping[Role, int], now_ms: int) -> dict[Role, int]:
        """How many workers each of these pools is to have, where it has so many.

        Where there is no room for more, a pool gives up at once what it can spare.
        """
        now = {pool.role: pool.workers for pool in look.pools}
        targets = self._steady.settle(now, present, now_ms)
        excess = sum(targets.get(role, 0) for role in LLM) - self._settings.workers_max
        for role in LLM:
            given = min(excess, targets.get(role, 0) - now.get(role, 0))
            if given > 0:
                targets[role] -= given
                excess -= given
        return targets
