"""A simulated GPU that searches: the real scheduler, and extends on virtual time.

Theory of operation. All searches on the places of a GPU advance together, one extend after the
other, and a search ends after the extends that the engine estimates for it.
`workers/vector/engine/scheduler.py` decides what follows from an arrival or an end, as in the
engine's dispatcher; the extends between two such events are counted, not stepped. An arrival is
handled at the end of the current extend.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from infra.planning.hardware import SearchCosts
from infra.simulator.log.clock import Alarm, Clock
from workers.retrieval.settings import RetrievalSettings
from workers.vector.engine.queues import NEVER_MS, QueuedSearch
from workers.vector.engine.scheduler import Drop, Plan, Running, SchedulerSettings, SearchScheduler
from workers.vector.index.kinds import SearchKind

PLACES = 256  # of a CUDA device, the engine's default
PARKED_MAX = 64
OnEnd = Callable[[Drop | None], None]  # why the search was dropped; None: it has a result


@dataclass(slots=True, eq=False, kw_only=True)
class _Search(QueuedSearch):
    on_end: OnEnd
    slot: int = -1
    extends_left: int = 0
    was_parked: bool = False


class SearchGpu:
    """One GPU with one shard of one copy of the index."""

    def __init__(
        self,
        clock: Clock,
        costs: SearchCosts,
        settings: RetrievalSettings,
        *,
        slow: float = 1.0,  # factor on times if another engine uses the same GPU
    ) -> None:
        self.busy_ms = 0.0
        self.dropped = 0
        self.search_counts = dict.fromkeys(SearchKind, 0)
        self._clock, self._costs, self._slow = clock, costs, slow
        self.scheduler = SearchScheduler(_settings(settings, costs.floor_ms))
        self._free = list(range(PLACES + PARKED_MAX))[::-1]
        self._active: dict[int, _Search] = {}
        self._parked: list[_Search] = []
        self._extend_ms = 0.0
        self._began_ms = 0.0
        self._planned = 0  # extends until the next ending
        self._alarm: Alarm | None = None

    def search(self, kind: SearchKind, on_end: OnEnd, deadline_ms: float = NEVER_MS) -> None:
        """Queue one search; `on_end` is called when it has ended or was dropped."""
        now_ms = self._clock.now_ms
        search = _Search(
            kind=kind,
            extends=self._costs.index.extends,
            extends_left=self._costs.index.extends,
            arrived_ms=now_ms,
            deadline_ms=deadline_ms,
            on_end=on_end,
        )
        refused = self.scheduler.arrive(search, now_ms)
        if refused is not None:
            self.dropped += 1
            on_end(refused)
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        """Plan again at the end of the current extend."""
        if self._alarm is None:
            self._run_plan()
        elif self._planned > 1:
            self._alarm.cancel()
            passed_ms = self._clock.now_ms - self._began_ms
            self._planned = max(1, min(self._planned, ceil(passed_ms / self._extend_ms - 1e-9)))
            self._alarm = self._clock.at(
                self._began_ms + self._planned * self._extend_ms, self._end_extends
            )

    def _end_extends(self) -> None:
        """End the planned extends and the searches that they complete."""
        self._alarm = None
        self.busy_ms += self._planned * self._extend_ms
        self.scheduler.add_measurement(self._extend_ms)
        finished_searches = []
        for search in self._active.values():
            search.extends_left -= self._planned
            if search.extends_left <= 0:
                finished_searches.append(search)
        for search in finished_searches:
            del self._active[search.slot]
            self._free.append(search.slot)
            self.search_counts[search.kind] += 1
        self._run_plan()
        for search in finished_searches:
            search.on_end(None)

    def _run_plan(self) -> None:
        """Carry out the scheduler's plan and start the next extends."""
        plan = self._plan()
        for slot in plan.park:
            search = self._active.pop(slot)
            search.was_parked = True
            self._parked.append(search)
        for slot in plan.resume:
            search = next(search for search in self._parked if search.slot == slot)
            self._parked.remove(search)
            self._active[slot] = search
        for item in plan.admit:
            assert isinstance(item, _Search)
            item.slot = self._free.pop()
            self._active[item.slot] = item
        self._begin(plan)
        for item, why in plan.dropped:
            assert isinstance(item, _Search)
            self.dropped += 1
            item.on_end(why)

    def _plan(self) -> Plan:
        running = [_running(search) for search in self._active.values()]
        return self.scheduler.plan(
            self._clock.now_ms,
            PLACES - len(self._active),
            len(self._free),
            running,
            [_running(search) for search in self._parked],
            lambda: max((search.extends_left for search in running), default=0),
        )

    def _begin(self, plan: Plan) -> None:
        if not self._active:
            if plan.wake_ms < NEVER_MS and len(self.scheduler):
                self._clock.at(plan.wake_ms, self._wake)
            return
        self._began_ms = self._clock.now_ms
        self._extend_ms = self._slow * self._costs.extend_ms(len(self._active))
        self._planned = min(search.extends_left for search in self._active.values())
        if plan.wake_ms < NEVER_MS and len(self.scheduler):
            until = ceil((plan.wake_ms - self._began_ms) / self._extend_ms)
            self._planned = min(self._planned, max(1, until))
        self._alarm = self._clock.after(self._planned * self._extend_ms, self._end_extends)

    def _wake(self) -> None:
        if self._alarm is None:
            self._run_plan()


def _running(search: _Search) -> Running:
    return Running(
        slot=search.slot,
        kind=search.kind,
        extends_left=search.extends_left,
        may_park=not search.was_parked,
    )


def _settings(settings: RetrievalSettings, ms_per_extend: float) -> SchedulerSettings:
    """Return a worker's settings, with room for parked searches beside its places."""
    return replace(settings.scheduler(), parked_max=PARKED_MAX, ms_per_extend=ms_per_extend)
