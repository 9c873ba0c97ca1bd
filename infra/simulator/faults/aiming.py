"""Aims faults: each strikes after its time, once a request is in the fault's phase.

A phase is a state of a request at the router (`streams/core/states.py`), or that no router is
alive. Counts how often each kind of fault struck in each phase.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infra.simulator.cluster import Checker, Cluster
from infra.simulator.faults.kinds import KINDS
from streams.core.effects import Effect
from streams.core.events import Event
from streams.core.requests.live import LiveRequest
from streams.core.states import State

NO_ROUTER = "no router"
PHASES = (*(state.value for state in State if state is not State.ENDED), NO_ROUTER)
StrikeCounts = Counter[tuple[str, str]]  # by kind and phase


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One planned fault of a seed."""

    number: int  # in the seed; seeds its own generator, so it does not depend on other faults
    kind: str
    at_ms: float
    phase: str  # the phase in which it strikes


class Aim(Checker):
    """Makes the planned faults strike in a cluster, until `end`."""

    def __init__(self, plan: Sequence[PlannedFault], seed: int) -> None:
        self.plan, self.reached = plan, StrikeCounts()
        self._seed = seed
        self._armed: list[PlannedFault] = []
        self._cluster: Cluster | None = None

    def begin(self, cluster: Cluster) -> None:
        """Schedule the planned faults on the cluster's clock."""
        self._cluster = cluster
        for planned in self.plan:
            cluster.clock.at(planned.at_ms, lambda planned=planned: self._arm(planned))  # type: ignore[misc]  # bound now

    def end(self) -> None:
        """Cancel the faults that have not struck."""
        self._armed.clear()

    def on_event(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        """Look for faults to strike, as requests may have changed their states."""
        self._look()

    def on_router_death(self) -> None:
        """Look for faults to strike, as no router is alive."""
        self._look()

    def _arm(self, planned: PlannedFault) -> None:
        self._armed.append(planned)
        self._look()

    def _look(self) -> None:
        """Strike with the armed faults whose phase is present; some phases last only one event."""
        cluster = self._cluster
        if not self._armed or cluster is None:
            return
        phases = _phases(cluster)
        for planned in [fault for fault in self._armed if fault.phase in phases]:
            self._armed.remove(planned)
            for phase in phases:
                self.reached[planned.kind, phase] += 1
            draw = np.random.default_rng([self._seed, planned.number])
            KINDS[planned.kind](cluster, draw, phases[planned.phase])


def _phases(cluster: Cluster) -> dict[str, LiveRequest | None]:
    """Return the phases that are present now, each with its first request."""
    if not cluster.router.alive:
        return {NO_ROUTER: None}
    live_by_phase: dict[str, LiveRequest | None] = {}
    for live in cluster.router.core.tables.requests.by_id.values():
        live_by_phase.setdefault(live.state.value, live)
    return live_by_phase
