"""Invariant 5: live state equals a rebuild from the log; the same events give the same effects."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from infra.simulator.cluster import Checker, Cluster
from schemas.records import Registration
from streams.core.effects import Decide, Effect, End
from streams.core.events import (
    CancellationArrived,
    Event,
    FleetRecordArrived,
    OutcomeArrived,
    PartitionReady,
    PartitionTaken,
    PhaseArrived,
    Placed,
    RequestArrived,
    ResumptionArrived,
    RetrievedArrived,
)
from streams.core.router import Router

EVERY_LOOKS = 20
View = dict[str, tuple[object, ...]]
_CHARGES = 9  # where in a view they stand
PARTITION = 0
_OF_PARTITION = (
    *(OutcomeArrived, Placed, PhaseArrived, RetrievedArrived),
    *(ResumptionArrived, CancellationArrived, RequestArrived),
)


class Rebuilds(Checker):
    """A second router that hears the same, and others that read the log now and then."""

    def __init__(self, make: Callable[[], Router]) -> None:
        self.compared = 0
        self._make = make
        self._twin: Router | None = make()
        self._log: list[Event] = []
        self._fleet: list[tuple[FleetRecordArrived, int]] = []
        self._looks = 0

    def router_died(self) -> None:
        """The next one has another past."""
        self._twin = None

    def applied(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        """Keep the log, and let the twin hear it."""
        if self._twin is not None:
            same = self._twin.apply(event, int(now_ms))
            assert same == effects, f"{event}: {effects} and {same}"
        if isinstance(event, FleetRecordArrived):
            self._fleet.append((event, int(now_ms)))
        elif isinstance(event, _OF_PARTITION):
            self._log.append(event)
        for effect in effects:
            if isinstance(effect, Decide):
                self._log.append(Placed(effect.decision, PARTITION))
            elif isinstance(effect, End):
                self._log.append(OutcomeArrived(effect.outcome, PARTITION))

    def looked(self, cluster: Cluster) -> None:
        """Compare, now and then."""
        self._looks += 1
        if self._looks % EVERY_LOOKS == 0 and cluster.router.alive:
            self.compared += 1
            live = _comparable(cluster.router.core)
            rebuilt = self._rebuilt(int(cluster.clock.now_ms))
            assert rebuilt == live, f"the log tells {rebuilt}, the router has {live}"

    def _rebuilt(self, now_ms: int) -> View:
        """As a router reads it that has nothing to give out."""
        router = self._make()
        for heard, at_ms in self._fleet:
            record = heard.record
            if not isinstance(record, Registration):
                record = replace(record, grants=())
            router.apply(replace(heard, record=record), at_ms)
        router.apply(PartitionTaken(PARTITION), now_ms)
        for kind in _OF_PARTITION:
            for event in self._log:
                if isinstance(event, kind):
                    router.apply(event, now_ms)
        router.apply(PartitionReady(PARTITION), now_ms)
        return _comparable(router)


def _comparable(router: Router) -> View:
    """Without how much work a placement was thought to be, of which the log says nothing."""
    views = {}
    for request_id, view in router.view().items():
        if len(view) > _CHARGES:  # else it waits
            charges = [(role, charge.life) for role, charge in view[_CHARGES]]  # type: ignore[attr-defined]  # pairs
            view = (*view[:_CHARGES], charges, *view[_CHARGES + 1 :])
        views[request_id] = view
    return views
