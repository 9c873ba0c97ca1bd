"""The vector engine: searches of any indexes, one by one, batched extend by extend on all cores.

`search` is for callers that come one at a time: whatever runs is advanced together, an arrival
joins at the next extend, and its result is what it would be alone. `search_many` is for arrays.
Each core has a lane (`lane.py`); a search goes to the lane with the least to do and stays there.
Bounds: places and slots of a lane, `inbox_max` searches that wait (QueueFull beyond), k and top_m.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schemas.errors import ConfigError, EngineDead, QueueFull, TriviumError
from schemas.log.clock import wall_ms
from workers.search import admission, bulk, metrics
from workers.search.index import Index
from workers.search.lane import Lane, Ticket
from workers.search.parallel import thread_count
from workers.search.query import Answer, Effort, Kind, Query
from workers.search.scheduler import Item, SchedulerSettings
from workers.search.slots import Slots

Array = np.ndarray[Any, Any]

_CHUNK_MAX = 64  # queries of a bulk call that a slot takes one after the other
_CHUNKS_PER_PLACE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Sizes of an engine."""

    lanes: int = 0  # threads; 0: as many as there are cores
    places: int = 12  # searches that a lane advances together
    slots: int = 32  # of a lane: places, and room for searches that gave theirs away
    extends_max: int = 16  # before a lane looks for deadlines and cancelled searches again
    inbox_max: int = 8_192  # searches that wait, over all lanes
    top_m_max: int = admission.TOP_M_MAX
    k_max: int = admission.K_MAX
    scanned_rows_max: int = admission.SCANNED_ROWS_MAX
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)

    def __post_init__(self) -> None:
        for name in ("places", "extends_max", "inbox_max", "top_m_max", "k_max"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name}: expected >= 1, found {getattr(self, name)}")
        if self.slots < self.places:
            raise ConfigError(
                f"engine.slots: expected at least engine.places ({self.places}), found {self.slots}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Where an engine stands."""

    running: int
    parked: int
    waiting: dict[Kind, int]
    places: int
    searches_total: int
    occupancy: float  # mean share of places in use while the engine worked, since its start
    idle_share: float  # of the task array: what masked dummies would be, 1 - occupancy
    busy_s: float  # time in kernels, all lanes
    ms_per_extend: float  # moving average


class SearchEngine:
    """Used from one event loop."""

    def __init__(
        self, settings: EngineSettings | None = None, *, clock_ms: Callable[[], float] = wall_ms
    ) -> None:
        self.settings = settings = settings or EngineSettings()
        self._clock_ms, self._closed = clock_ms, False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outcomes: deque[tuple[asyncio.Future[Any], Any]] = deque()
        self._woken = False
        self.lanes = [
            Lane(
                Slots(settings.slots, top_m_max=settings.top_m_max, k_max=settings.k_max),
                settings.places,
                settings.scheduler,
                self._deliver,
                clock_ms,
                extends_max=settings.extends_max,
                name=f"search-{i}",
            )
            for i in range(thread_count(settings.lanes))
        ]

    async def search(self, index: Index, query: Query) -> Answer:
        """The nearest rows as the index is now.

        Raises WrongDimension, InvalidVector, InvalidRequest, UnknownFilterField, EmptyIndex,
        QueueFull, DeadlineExceeded or EngineDead. Cancelling the caller ends the search.
        """
        settings, view = self.settings, index.view()
        admission.check(query, view, top_m_max=settings.top_m_max, k_max=settings.k_max)
        vector = metrics.prepared(query.vector, view.dim, view.metric)
        search = admission.admission(
            query, vector, view, seeds=query.seeds, top_m_max=settings.top_m_max,
            scanned_rows_max=settings.scanned_rows_max,
        )  # fmt: skip
        answer: Answer = await self._run(search, query.kind, query.deadline_ms, search.extends)
        return answer

    async def search_many(
        self, index: Index, queries: Any, effort: Effort | None = None, *,
        kind: Kind = Kind.DECODE, deadline_ms: int | None = None,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Rows and distances of the nearest to each query, shapes (queries, k).

        Places beyond the last hit hold row -1 at infinity. All see one snapshot. Raises what
        `search` does; then the rest of the queries is given up.
        """
        settings, view, effort = self.settings, index.view(), effort or Effort()
        admission.check(effort, view, top_m_max=settings.top_m_max, k_max=settings.k_max)
        prepared = metrics.prepared(queries, view.dim, view.metric)
        search = admission.admission(
            effort, prepared, view, top_m_max=settings.top_m_max,
            scanned_rows_max=settings.scanned_rows_max,
        )  # fmt: skip
        rows, distances = await self._many(search, prepared, kind, deadline_ms)
        short = np.flatnonzero(rows[:, min(effort.k, search.allowed) - 1] < 0)
        if len(short) and not search.exact:
            picked = np.ascontiguousarray(prepared[short])
            scan = admission.admission(effort, picked, view, scanned_rows_max=view.count)
            rows[short], distances[short] = await self._many(scan, picked, kind, deadline_ms)
        return rows, view.metric.shown(distances)

    def set_share(self, share: float, flush_ms: float) -> None:
        """What the control loop found: prefill's share of places, and its flush timeout."""
        for lane in self.lanes:
            lane.scheduler.share, lane.scheduler.flush_ms = share, flush_ms

    def load(self) -> EngineLoad:
        """Where it stands now."""
        figures = [lane.figures for lane in self.lanes]
        rounds, places = sum(f.rounds for f in figures), self.settings.places
        used = sum(f.places_used for f in figures) / max(1, rounds * places)
        return EngineLoad(
            running=sum(lane.running for lane in self.lanes),
            parked=sum(lane.parked for lane in self.lanes),
            waiting={kind: sum(x.scheduler.waiting(kind) for x in self.lanes) for kind in Kind},
            places=places * len(self.lanes),
            searches_total=sum(f.searches for f in figures),
            occupancy=used,
            idle_share=1 - used,
            busy_s=sum(f.busy_s for f in figures),
            ms_per_extend=sum(x.scheduler.ms_per_extend for x in self.lanes) / len(self.lanes),
        )

    def waits_ms(
        self, kind: Kind, shares: Sequence[float], now_ms: float, window_ms: float = 5_000
    ) -> list[float] | None:
        """Waits for a slot below which these shares of a class lie; None where there were none."""
        samples = [sample for lane in self.lanes for sample in list(lane.waits)]
        found = sorted(
            waited for of, waited, at_ms in samples if of is kind and now_ms - at_ms <= window_ms
        )
        return [found[min(len(found) - 1, int(s * len(found)))] for s in shares] if found else None

    async def close(self) -> None:
        """End what runs with EngineDead, and the threads."""
        self._closed = True
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        for lane in self.lanes:
            lane.close()

    async def _many(
        self, search: admission.Search, queries: Array, kind: Kind, deadline_ms: int | None
    ) -> tuple[Array, Array]:
        rows = np.empty((len(queries), search.k), np.int64)
        distances = np.empty((len(queries), search.k), np.float32)
        places = self.settings.places * len(self.lanes)
        size = min(_CHUNK_MAX, -(-len(queries) // places))
        room = asyncio.Semaphore(places * _CHUNKS_PER_PLACE)

        async def chunk(first: int) -> None:
            last = min(len(queries), first + size)
            async with room:
                source = bulk.feed(queries, rows, distances, first, last)
                extends = search.extends * (last - first)
                await self._run(search, kind, deadline_ms, extends, source)

        try:
            async with asyncio.TaskGroup() as together:
                for first in range(0, len(queries), max(1, size)):
                    together.create_task(chunk(first))
        except* TriviumError as errors:
            raise errors.exceptions[0] from None
        return rows, distances

    async def _run(
        self, search: admission.Search, kind: Kind, deadline_ms: int | None, extends: int,
        source: Array | None = None,
    ) -> Any:  # fmt: skip
        self._check_open()
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        assert self._loop is loop, "an engine belongs to one event loop"
        item = Item(kind=kind, extends=extends, arrived_ms=self._clock_ms())
        if deadline_ms is not None:
            item.deadline_ms = deadline_ms
        reply: asyncio.Future[Any] = loop.create_future()
        item.search = ticket = Ticket(search, item, reply, source)
        lane = min(self.lanes, key=lambda each: each.load)
        lane.submit(ticket)
        try:
            return await reply
        except asyncio.CancelledError:
            lane.cancel(ticket)
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("the engine is closed")
        waiting = sum(lane.waiting for lane in self.lanes)
        if waiting >= self.settings.inbox_max:
            raise QueueFull(
                f"expected fewer than {self.settings.inbox_max} waiting searches, found {waiting}; "
                "try again later"
            )

    def _deliver(self, outcomes: Sequence[tuple[Any, Any]]) -> None:
        """Called by lanes: one wake-up of the loop for all answers of a turn."""
        self._outcomes.extend(outcomes)
        if self._loop is not None and not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and its callers with it
                self._loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        self._woken = False  # before the look: what comes now wakes the loop again
        while self._outcomes:
            _settle(*self._outcomes.popleft())


def _settle(reply: "asyncio.Future[Any]", outcome: Any) -> None:
    if reply.done():
        return
    if isinstance(outcome, BaseException):
        reply.set_exception(outcome)
    else:
        reply.set_result(outcome)
