"""Part of the search benchmark: variants of the scheduler, in a simulation on virtual time.

The real `SearchScheduler` controls a batch of places that all advance one extend per step, as the
engine's do. First come first served and static priority control the same batch. The load has four
phases: calm, a surge of prefill searches, a surge of decode searches, calm. A miss is a prefill
search that ends after its deadline or never, or a decode search that takes longer than
`DECODE_SLO_MS`. Nothing here reads a clock; a seed decides the arrivals.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from infra.bench.results import Bar, at_least, percentiles
from infra.bench.search.scene import SearchScene
from workers.retrieval.settings import RetrievalSettings
from workers.vector.engine.queues import QueuedSearch
from workers.vector.engine.scheduler import Drop, Plan, Running, SchedulerSettings, SearchScheduler
from workers.vector.index.kinds import SearchKind

STEP_MS = 0.2
PLACES, SLOTS = 8, 24
EXTENDS = {SearchKind.DECODE: 20, SearchKind.PREFILL: 131}  # with routing lists of 16 and 128
DECODE_SLO_MS = 20.0  # the time between two probes of a sequence
DEADLINE_MS = (35.0, 80.0)  # after arrival, uniform; alone a prefill search takes 26 ms
_CALM = (0.44, 0.26)  # load of prefill, of decode
STEPS = {
    "surge below capacity": (_CALM, (0.68, 0.26), (0.30, 0.64), _CALM),
    "surge beyond capacity": (_CALM, (0.80, 0.26), (0.36, 0.70), _CALM),
}
BASE = replace(RetrievalSettings().scheduler(), ms_per_extend=STEP_MS)  # the settings of workers
SHARES, PARK_AFTER_MS = (0.0, 0.1, 0.3, 0.5, 0.9), (1.0, 5.0, 20.0, 50.0)
IN_ORDER, PREFILL_FIRST = "first come first served", "prefill always first"
HALF, GATHERED = "slack, half reserved", "slack, four gathered"


class Queues(Protocol):
    """Decides which searches get the free places."""

    def arrive(self, item: QueuedSearch, now_ms: float) -> Drop | None: ...

    def plan(
        self, now_ms: float, free_places: int, free_slots: int,
        running: Sequence[Running] = (), parked: Sequence[Running] = (),
    ) -> Plan: ...  # fmt: skip


class FifoQueues:
    """First come first served, over both classes or, with `prefill_first`, prefill always first."""

    def __init__(self, *, prefill_first: bool) -> None:
        self._prefill_first = prefill_first
        self._waiting: tuple[deque[QueuedSearch], deque[QueuedSearch]] = (deque(), deque())

    def arrive(self, item: QueuedSearch, now_ms: float) -> Drop | None:
        behind = self._prefill_first and item.kind is not SearchKind.PREFILL
        self._waiting[behind].append(item)
        return None

    def plan(
        self, now_ms: float, free_places: int, free_slots: int,
        running: Sequence[Running] = (), parked: Sequence[Running] = (),
    ) -> Plan:  # fmt: skip
        plan = Plan()
        for queue in self._waiting:
            while queue and len(plan.admit) < free_places:
                plan.admit.append(queue.popleft())
        return plan


@dataclass(slots=True)
class _Slot:
    item: QueuedSearch
    extends_left: int
    may_park: bool = True


@dataclass(slots=True)
class SimulationResult:
    """The times and misses of one simulated run."""

    taken_ms: dict[SearchKind, list[float]] = field(
        default_factory=lambda: {k: [] for k in EXTENDS}
    )
    misses: dict[SearchKind, int] = field(default_factory=lambda: dict.fromkeys(EXTENDS, 0))
    places_used_ms: float = 0.0
    ended_ms: float = 0.0

    @property
    def missed(self) -> int:
        return sum(self.misses.values())


def arrivals(seed: int, duration_ms: float, step: str) -> list[QueuedSearch]:
    """Return Poisson arrivals in order of time; all phases of the load step are equally long."""
    random, items = np.random.default_rng(seed), []
    phases = STEPS[step]
    phase_ms = duration_ms / len(phases)
    for number, loads in enumerate(phases):
        for kind, load in zip((SearchKind.PREFILL, SearchKind.DECODE), loads, strict=True):
            mean_ms = EXTENDS[kind] * STEP_MS / (load * PLACES)
            gaps = random.exponential(mean_ms, int(2 * phase_ms / mean_ms) + 20)
            times = number * phase_ms + np.cumsum(gaps)
            items += [
                QueuedSearch(kind=kind, extends=EXTENDS[kind], arrived_ms=at_ms,
                     deadline_ms=at_ms + wait if kind is SearchKind.PREFILL else math.inf)
                for at_ms, wait in zip(
                    times.tolist(), random.uniform(*DEADLINE_MS, len(times)).tolist(), strict=True
                )
                if at_ms < (number + 1) * phase_ms
            ]  # fmt: skip
    return sorted(items, key=lambda item: item.arrived_ms)


class Simulation:
    """Simulates one run of a scheduler on virtual time."""

    def __init__(self, queues: Queues) -> None:
        self.queues, self.result = queues, SimulationResult()
        self._active: dict[int, _Slot] = {}
        self._parked: dict[int, _Slot] = {}
        self._free = list(range(SLOTS))

    def run(self, items: Sequence[QueuedSearch]) -> SimulationResult:
        """Run the simulation until every search has ended."""
        now_ms, coming = 0.0, deque(items)
        while coming or self._active or self._parked or self._waiting(now_ms):
            while coming and coming[0].arrived_ms <= now_ms:
                item = coming.popleft()
                if self.queues.arrive(item, now_ms) is not None:
                    self.result.misses[item.kind] += 1
            until_ms = self._turn(now_ms)
            if coming:
                until_ms = min(until_ms, coming[0].arrived_ms)
            steps = max(1, math.ceil((until_ms - now_ms) / STEP_MS)) if until_ms < math.inf else 1
            if self._active:
                steps = min(steps, min(slot.extends_left for slot in self._active.values()))
            now_ms += steps * STEP_MS
            self._advance(steps, now_ms)
        self.result.ended_ms = now_ms
        return self.result

    def _waiting(self, now_ms: float) -> bool:
        """Return whether a waiting search can start on an empty batch."""
        self._turn(now_ms)
        return bool(self._active)

    def _turn(self, now_ms: float) -> float:
        """Make a plan and carry it out; return when the next one is due at the latest."""
        plan = self.queues.plan(
            now_ms, PLACES - len(self._active), len(self._free),
            list(self._running(self._active)), list(self._running(self._parked)),
        )  # fmt: skip
        for number in plan.park:
            self._parked[number] = self._active.pop(number)
            self._parked[number].may_park = False
        for number in plan.resume:
            self._active[number] = self._parked.pop(number)
        for item in plan.admit:
            self._active[self._free.pop()] = _Slot(item, item.extends)
        for item, _why in plan.dropped:
            self.result.misses[item.kind] += 1
        assert len(self._active) <= PLACES
        return plan.wake_ms

    @staticmethod
    def _running(slots: dict[int, _Slot]) -> Iterator[Running]:
        for number, slot in slots.items():
            yield Running(
                slot=number,
                kind=slot.item.kind,
                extends_left=slot.extends_left,
                may_park=slot.may_park,
            )

    def _advance(self, steps: int, now_ms: float) -> None:
        self.result.places_used_ms += len(self._active) * steps * STEP_MS
        for number, slot in list(self._active.items()):
            slot.extends_left -= steps
            if slot.extends_left > 0:
                continue
            del self._active[number]
            self._free.append(number)
            self._finish(slot.item, now_ms)

    def _finish(self, item: QueuedSearch, now_ms: float) -> None:
        took_ms = now_ms - item.arrived_ms
        self.result.taken_ms[item.kind].append(took_ms)
        if item.kind is SearchKind.PREFILL:
            self.result.misses[item.kind] += now_ms > item.deadline_ms
        else:
            self.result.misses[item.kind] += took_ms > DECODE_SLO_MS


def variants() -> dict[str, SchedulerSettings | None]:
    """Return the scheduler's settings by variant; None for other schedulers."""
    grid = [replace(BASE, share=r, park_after_ms=park) for r in SHARES for park in PARK_AFTER_MS]
    return {
        IN_ORDER: None,
        PREFILL_FIRST: None,
        HALF: replace(BASE, share=0.5),
        GATHERED: replace(BASE, gather_min=4),
        **{_variant_name(settings): settings for settings in grid},
    }


def _variant_name(settings: SchedulerSettings) -> str:
    return f"slack, share {settings.share:g}, parks after {settings.park_after_ms:g} ms"


def ablation(scene: SearchScene) -> tuple[dict[str, Any], list[Bar]]:
    """Run part 6: misses of each variant over the same arrivals."""
    options, progress = scene.options, scene.progress
    at: dict[str, Any] = {}
    bars: list[Bar] = []
    for step in STEPS:
        figures: dict[str, Any] = {}
        for name, settings in variants().items():
            progress(f"scheduler, {step}: {name}")
            results = []
            for number in range(options.sched_seeds):
                queues: Queues = FifoQueues(prefill_first=name == PREFILL_FIRST)
                if settings is not None:
                    queues = SearchScheduler(settings)
                items = arrivals(options.seed + number, options.sched_ms, step)
                results.append(Simulation(queues).run(items))
            figures[name] = _figures(results)
        misses = {name: row["misses"] for name, row in figures.items()}
        best = min(
            (n for n, s in variants().items() if s and n == _variant_name(s)),
            key=misses.__getitem__,
        )
        usual = misses[_variant_name(BASE)]
        names = [IN_ORDER, PREFILL_FIRST, HALF, GATHERED, _variant_name(BASE), best]
        at[step] = {"variants": figures, "best": best, "shown": list(dict.fromkeys(names))}
        for label, saved in (
            ("slack saves over first come first served", misses[IN_ORDER] - usual),
            ("slack saves over prefill always first", misses[PREFILL_FIRST] - usual),
            ("no reserved share saves over half of the places", misses[HALF] - usual),
            ("gathering none saves over gathering four", misses[GATHERED] - usual),
        ):
            bars.append(at_least(f"{step}: misses that {label}", saved, 1, "searches"))
    return {"at": at}, bars


def _figures(results: Sequence[SimulationResult]) -> dict[str, Any]:
    """Sum misses and times over the seeds."""
    row: dict[str, Any] = {"misses": sum(result.missed for result in results)}
    for kind in EXTENDS:
        times_ms = [ms for result in results for ms in result.taken_ms[kind]]
        row[f"{kind}_misses"] = sum(result.misses[kind] for result in results)
        row |= percentiles(times_ms, prefix=f"{kind}_ms_p")
        row[f"{kind}_searches"] = len(times_ms)
    used_ms = sum(result.places_used_ms for result in results)
    row["occupancy"] = used_ms / (PLACES * sum(result.ended_ms for result in results))
    return row
