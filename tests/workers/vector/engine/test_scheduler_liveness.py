"""Nobody waits for company, and nobody waits for long: bounds in extends, on time that is told."""

import numpy as np
import pytest

from tests.workers.vector.data import clustered_index, gaussian
from workers.vector.engine.engine import EngineSettings, SearchEngine
from workers.vector.engine.queues import QueuedSearch
from workers.vector.engine.scheduler import Running, SchedulerSettings, SearchScheduler
from workers.vector.index.kinds import SearchKind
from workers.vector.index.query import Query

PLACES, EXTENDS = 4, 60  # of a decode search
MS_PER_EXTEND = 0.125


@pytest.mark.parametrize("kind", [SearchKind.PREFILL, SearchKind.DECODE, SearchKind.LINK])
async def test_engine_answers_lone_search_without_timeout(kind: SearchKind) -> None:
    """No time passes for this engine: a search that waited for some would wait for ever."""
    never = SchedulerSettings(park_after_ms=1e9, share=0.5)
    engine = SearchEngine(EngineSettings(lanes=1, scheduler=never), clock_ms=lambda: 0.0)
    index = clustered_index(1_500)
    query = gaussian(1, 20, seed=9)[0]
    answer = await engine.search(index, Query(vector=query, kind=kind))
    assert np.array_equal(answer.rows, index.search(query)[0][0])
    await engine.close()


class Engine:
    """Places that extend once a step, told by a scheduler; decode searches never run out."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.scheduler, self.step = SearchScheduler(settings), 0
        self.searches: dict[
            int, tuple[SearchKind, int]
        ] = {}  # by slot: class, and extends that are left
        self.parked: list[int] = []
        self.were_parked: set[int] = set()
        self.admitted: list[tuple[int, QueuedSearch]] = []  # with the step

    def arrive(self, kind: SearchKind) -> QueuedSearch:
        item = QueuedSearch(kind=kind, extends=EXTENDS, arrived_ms=self.now_ms)
        self.scheduler.arrive(item, self.now_ms)
        return item

    @property
    def now_ms(self) -> float:
        return self.step * MS_PER_EXTEND

    def extend(self) -> None:
        """All that runs, once; then a plan."""
        while self.scheduler.waiting(SearchKind.DECODE) < 8:
            self.arrive(SearchKind.DECODE)
        for slot in set(self.searches) - set(self.parked):
            kind, extends_left = self.searches[slot]
            self.searches[slot] = (kind, extends_left - 1)
            if extends_left == 1:
                del self.searches[slot]
                self.were_parked.discard(slot)
        runs = [self._running(slot) for slot in self.searches if slot not in self.parked]
        parked = [self._running(slot) for slot in self.parked]
        free_slots = 2 * PLACES - len(self.searches)
        plan = self.scheduler.plan(self.now_ms, PLACES - len(runs), free_slots, runs, parked)
        self.parked += plan.park
        self.were_parked |= set(plan.park)
        self.parked = [slot for slot in self.parked if slot not in plan.resume]
        for item in plan.admit:
            slot = min(set(range(2 * PLACES)) - set(self.searches))
            self.searches[slot] = (item.kind, item.extends)
            self.admitted.append((self.step, item))
        self.step += 1

    def _running(self, slot: int) -> Running:
        kind, extends_left = self.searches[slot]
        return Running(
            slot=slot, kind=kind, extends_left=extends_left, may_park=slot not in self.were_parked
        )

    def steps(self, kind: SearchKind) -> list[int]:
        """When searches of a class were admitted."""
        return [step for step, item in self.admitted if item.kind is kind]


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("park_after_ms", [0.0, 1.0, 5.0])
def test_prefill_wait_is_bounded_under_full_decode_queue(
    park_after_ms: float, share: float
) -> None:
    for phase in range(EXTENDS):
        engine = Engine(SchedulerSettings(park_after_ms=park_after_ms, share=share))
        engine.scheduler.ms_per_extend = MS_PER_EXTEND
        for _ in range(phase):
            engine.extend()
        began = engine.step
        engine.arrive(SearchKind.PREFILL)
        while not engine.steps(SearchKind.PREFILL):
            engine.extend()
        waited = engine.steps(SearchKind.PREFILL)[0] - began
        assert waited <= park_after_ms / MS_PER_EXTEND + 1, "at the timeout, or one extend later"


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_decode_wait_is_bounded_under_endless_prefill(
    share: float,
) -> None:
    engine = Engine(SchedulerSettings(park_after_ms=0.0, share=share))
    for _ in range(50 * EXTENDS):
        while engine.scheduler.waiting(SearchKind.PREFILL) < 8:
            engine.arrive(SearchKind.PREFILL)
        engine.extend()
    waits = np.diff([0, *engine.steps(SearchKind.DECODE), engine.step])
    assert waits.max() <= EXTENDS / (1 - share) + EXTENDS
