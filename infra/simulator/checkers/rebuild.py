"""Invariant 5: live state equals a rebuild from the log; the same events give the same effects."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from infra.simulator.cluster import Checker, Cluster
from infra.simulator.members.router import ROUTER
from streams.core.effects import Decide, Effect, End
from streams.core.events import (
    CancellationArrived,
    ContinuedArrived,
    DecisionLoaded,
    Event,
    FleetRecordArrived,
    OutcomeArrived,
    PartitionLost,
    PartitionReady,
    PartitionTaken,
    PhaseArrived,
    RequestArrived,
    ResumptionArrived,
    RetrievedArrived,
)
from streams.core.router import Router

EVERY_LOOKS = 20
View = dict[str, tuple[object, ...]]
_CHARGES = 9  # index of the charges in a view
PARTITION = 0
_OF_PARTITION = (
    *(OutcomeArrived, DecisionLoaded, PhaseArrived, RetrievedArrived, ContinuedArrived),
    *(CancellationArrived, RequestArrived),
)
READER = "reader"  # a router without any worker's grants
_SAME_TOPIC: dict[type, type] = {ResumptionArrived: CancellationArrived}  # in known order


class Rebuilds(Checker):
    """A twin router that gets the same events, and a reader that rebuilds state at times.

    `make` returns a router of the given name.
    """

    def __init__(self, make: Callable[[str], Router]) -> None:
        self.compared = 0
        self._twin: Router | None = make(ROUTER)
        self._log: defaultdict[type, list[Event]] = defaultdict(list)  # in order, by type
        self._reader = make(READER)  # applies fleet records only, between rebuilds
        self._looks = 0

    def on_router_death(self) -> None:
        """Drop the twin, as the next router has other past events."""
        self._twin = None

    def on_event(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        """Keep the event, and check that the twin returns the same effects."""
        if self._twin is not None:
            same = self._twin.apply(event, int(now_ms))
            assert same == effects, f"{event}: {effects} and {same}"
        if isinstance(event, FleetRecordArrived):
            self._reader.apply(event, int(now_ms))
        else:
            self._log[_SAME_TOPIC.get(type(event), type(event))].append(event)
        for effect in effects:
            if isinstance(effect, Decide):
                self._log[DecisionLoaded].append(DecisionLoaded(effect.decision, PARTITION))
            elif isinstance(effect, End):
                self._log[OutcomeArrived].append(OutcomeArrived(effect.outcome, PARTITION))

    def on_tick(self, cluster: Cluster) -> None:
        """Compare at times; not while the router sleeps, as no time passes for it."""
        self._looks += 1
        awake = cluster.router.alive and not cluster.router.is_asleep
        if self._looks % EVERY_LOOKS == 0 and awake:
            self.compared += 1
            live = _comparable(cluster.router.core)
            rebuilt = self._rebuild(int(cluster.clock.now_ms))
            assert rebuilt == live, f"the log tells {rebuilt}, the router has {live}"

    def _rebuild(self, now_ms: int) -> View:
        """Rebuild the state at a router without grants; it then loses the partition again."""
        router = self._reader
        router.apply(PartitionTaken(PARTITION), now_ms)
        for kind in _OF_PARTITION:
            for event in self._log[kind]:
                router.apply(event, now_ms)
        router.apply(PartitionReady(PARTITION), now_ms)
        view = _comparable(router)
        router.apply(PartitionLost(PARTITION), now_ms)
        return view


def _comparable(router: Router) -> View:
    """Return a router's view without the estimated work of placements, which the log does not
    have."""
    views = {}
    for request_id, view in router.view().items():
        if len(view) > _CHARGES:  # else the request waits
            charges = [(role, charge.life) for role, charge in view[_CHARGES]]  # type: ignore[attr-defined]  # pairs
            view = (*view[:_CHARGES], charges, *view[_CHARGES + 1 :])
        views[request_id] = view
    return views
