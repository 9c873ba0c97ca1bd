"""When faults strike: from their time on, at the first moment at which a request is in a phase.

A phase is a state of a request at the router (`streams/core/states.py`), or that there is no router
now. Counts, for every pair of a kind of fault and a phase, how often one struck in the other.
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
    """One fault of a seed."""

    number: int  # within the seed; with it, it is the same whatever others there are
    kind: str
    at_ms: float
    phase: str  # in which it is to strike


class Aim(Checker):
    """Has planned faults strike in a cluster, until it is to be left alone."""

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
        """What has not struck will not."""
        self._armed.clear()

    def on_event(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        """The router's requests may be in other states."""
        self._look()

    def on_router_death(self) -> None:
        """Nobody is in any state."""
        self._look()

    def _arm(self, planned: PlannedFault) -> None:
        self._armed.append(planned)
        self._look()

    def _look(self) -> None:
        """Some phases last no longer than one event."""
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
    """Those that something is in now, each with the first request that is."""
    if not cluster.router.alive:
        return {NO_ROUTER: None}
    live_by_phase: dict[str, LiveRequest | None] = {}
    for live in cluster.router.core.tables.requests.by_id.values():
        live_by_phase.setdefault(live.state.value, live)
    return live_by_phase
