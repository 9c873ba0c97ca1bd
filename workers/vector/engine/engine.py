"""The vector engine: searches of any indexes, batched extend by extend on all cores.

`search` takes one query per call. All running searches are advanced together, a new one joins at
the next extend, and its result does not depend on the others. `neighbours` is for the linking of
new rows. Each core has a lane (`core_lanes.py`); a search goes to the lane with the fewest searches
and stays there (`dispatcher.py`). Bounds: places and slots of a lane, `inbox_max` waiting searches
(QueueFull beyond), k and top_m.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from schemas.errors import ConfigError, TriviumError
from schemas.sections import Natural, Positive, section
from workers.vector.cuda.batch import BatchSettings
from workers.vector.engine import backend
from workers.vector.engine.core_lanes import CoreLanes
from workers.vector.engine.cuda_lanes import CudaLanes
from workers.vector.engine.dispatcher import SearchDispatcher
from workers.vector.engine.lanes import Lanes, LaneStats
from workers.vector.engine.occupancy import Ticket
from workers.vector.engine.queues import NEVER_MS
from workers.vector.engine.scheduler import SchedulerSettings
from workers.vector.index import bulk, inputs, plans
from workers.vector.index.index import Index
from workers.vector.index.kinds import SearchKind
from workers.vector.index.query import Effort, Query, SearchAnswer
from workers.vector.index.view import IndexView
from workers.vector.kernels.arrays import Array
from workers.vector.kernels.metrics import Metric
from workers.vector.kernels.parallel import thread_count
from workers.vector.limits import (
    AHEAD,
    CUDA_TOP_M_MAX,
    K_MAX,
    PLACES,
    SCANNED_ROWS_MAX,
    SLOTS,
    TOP_M_MAX,
)
from workers.vector.traversal.slots import CpuSlots, SlotRows


@section("engine")
class EngineSettings:
    """Sizes of an engine: lanes, slots, queues and limits of one search."""

    lanes: int = 0  # threads; 0: one per core
    places: Positive = PLACES  # searches that a lane advances together
    slots: int = SLOTS  # searches that a lane holds: in places, waiting, parked
    # searches that wait in a lane for a place; at most half of the slots beyond the places
    ahead: Natural = AHEAD
    extends_max: Positive = 64  # extends of a lane between two checks for commands
    inbox_max: Positive = 8_192  # waiting searches, over all lanes
    top_m_max: Positive = TOP_M_MAX
    k_max: Positive = K_MAX
    scanned_rows_max: int = SCANNED_ROWS_MAX
    device: str = "cpu"  # or cuda, or auto
    cuda_device: Natural = 0  # number among the visible devices
    cuda: BatchSettings = field(default_factory=BatchSettings)  # replaces lanes, places and slots
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)

    def __post_init__(self) -> None:
        if self.slots < self.places or self.slots & (self.slots - 1):
            raise ConfigError(
                f"engine.slots: expected a power of two, and at least engine.places "
                f"({self.places}), found {self.slots}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEngineLoad:
    """How busy an engine is now."""

    running: int
    parked: int
    waiting: dict[SearchKind, int]
    places: int
    searches_total: int
    occupancy: float  # mean share of places in use while the engine worked, since its start
    ms_per_extend: float  # moving average


def _epoch_ms() -> float:
    return 1_000 * time.time()


class SearchEngine:
    """The engine of one event loop, which makes all calls.

    `clock_ms` returns the present time, on the clock of `Query.deadline_ms`.
    """

    def __init__(
        self, settings: EngineSettings | None = None, *, clock_ms: Callable[[], float] = _epoch_ms
    ) -> None:
        self.settings = settings = settings or EngineSettings()
        slots, lanes, places, ahead = _lanes(settings)
        inputs.prepare(np.zeros(1), 1, Metric.SQEUCLIDEAN)  # compile it before the first search
        self._clock_ms, self._lanes, self._places = clock_ms, lanes.count, places * lanes.count
        self._limits = plans.SearchLimits(
            min(settings.top_m_max, lanes.top_m_max), settings.k_max, lanes.tasks_max,
            lanes.dim_max, settings.scanned_rows_max,
        )  # fmt: skip
        admitted = (places + ahead) * lanes.count
        self._dispatcher = SearchDispatcher(
            slots, lanes, admitted, settings.scheduler, clock_ms, settings.inbox_max
        )

    async def search(self, index: Index, query: Query) -> SearchAnswer:
        """Search an index in its present state and return the nearest rows.

        Raises WrongDimension, InvalidVector, InvalidRequest, UnknownFilterField, EmptyIndex,
        QueueFull, DeadlineExceeded or EngineDead. Cancelling the caller ends the search.
        """
        view = index.view()
        if query.where is not None and view.takes_long(query.where):
            await asyncio.to_thread(view.allowed, query.where)
        plan = plans.plan_search(query, view, self._limits)
        vector = inputs.prepare(query.vector, view.dim, view.metric)
        seeds = query.seeds
        search = (
            plans.new_search(view, plan, vector, seeds)
            if len(seeds)
            else plans.PreparedSearch(view, plan, vector)
        )
        ticket = self._submit(search, query.kind, query.deadline_ms)
        try:
            answer: SearchAnswer = await ticket.reply
        except asyncio.CancelledError:
            self._dispatcher.cancel(ticket)
            raise
        return answer

    async def neighbours(self, view: IndexView, queries: Array, effort: Effort) -> Array:
        """Return the rows nearest to prepared queries, (queries, k), for `Index.link`; -1: no hit.

        The queries are the lowest class: they take at most `Lanes.feeds` places, none while other
        searches lack one. Raises what `search` raises, and cancels the other queries.
        """
        limit = self._limits.top_m_max
        plan = plans.plan_search(
            replace(effort, top_m=min(effort.top_m, limit)), view, self._limits
        )
        rows = await self._rows(plan, view, queries)
        if len(short := plan.too_short(rows)):
            scan = plans.plan_search(
                effort, view, self._limits._replace(scanned_rows_max=view.count)
            )
            rows[short] = await self._rows(scan, view, np.ascontiguousarray(queries[short]))
        return rows

    def load(self) -> SearchEngineLoad:
        """Return how busy the engine is now."""
        dispatcher = self._dispatcher
        stats = dispatcher.lanes.stats()
        occupancy = stats.places_used / max(1, stats.extends * self._places / self._lanes)
        return SearchEngineLoad(
            running=dispatcher.occupancy.in_places,
            parked=len(dispatcher.occupancy.parked),
            waiting={kind: dispatcher.scheduler.waiting(kind) for kind in SearchKind},
            places=self._places,
            searches_total=dispatcher.searches,
            occupancy=occupancy,
            ms_per_extend=dispatcher.scheduler.ms_per_extend,
        )

    def stats(self) -> LaneStats:
        """Return the work of all lanes since their start."""
        return self._dispatcher.lanes.stats()

    def waits_ms(
        self, kind: SearchKind, shares: Sequence[float], now_ms: float, window_ms: float = 5_000
    ) -> list[float] | None:
        """Return quantiles, at `shares`, of a class's waits for a slot; None without waits."""
        return self._dispatcher.waits_ms(kind, shares, now_ms, window_ms)

    async def close(self) -> None:
        """End all searches with EngineDead, and stop the threads."""
        if not self._dispatcher.closed:
            self._dispatcher.stop_accepting("the engine is closed")
            await asyncio.to_thread(self._dispatcher.lanes.close)
            self._dispatcher.end_all()

    @property
    def backend(self) -> str:
        """Return the name of the backend, `cpu` or `cuda`."""
        return self._dispatcher.lanes.backend

    async def _rows(self, plan: plans.SearchPlan, view: IndexView, queries: Array) -> Array:
        search = plans.new_search(view, plan, queries)
        rows = np.empty((len(queries), plan.k), np.int64)
        distances = np.empty((len(queries), plan.k), np.float32)
        lanes = self._dispatcher.lanes
        free_feeds, size = asyncio.Semaphore(lanes.feeds), lanes.feed_queries

        async def chunk(first: int) -> None:
            last = min(len(queries), first + size)
            async with free_feeds:
                source = bulk.feed(queries, rows, distances, first, last)
                keeps = (queries, rows, distances)
                ticket = self._submit(search, SearchKind.LINK, None, last - first, source, keeps)
                try:
                    await ticket.reply
                except asyncio.CancelledError:
                    self._dispatcher.cancel(ticket)
                    raise

        try:
            async with asyncio.TaskGroup() as group:
                for first in range(0, len(queries), size):
                    group.create_task(chunk(first))
        except* TriviumError as errors:
            raise errors.exceptions[0] from None
        return rows

    def _submit(
        self, search: plans.PreparedSearch, kind: SearchKind, deadline_ms: int | None,
        searches: int = 1, source: Array | None = None, keeps: Any = None,
    ) -> Ticket:  # fmt: skip
        """Submit a search and return its ticket; raises QueueFull, DeadlineExceeded, EngineDead."""
        dispatcher, loop = self._dispatcher, asyncio.get_running_loop()
        ticket = Ticket(
            kind, search.plan.extends * searches,
            dispatcher.due_ms if dispatcher.is_due else self._clock_ms(),
            NEVER_MS if deadline_ms is None else deadline_ms,
            search, loop.create_future(), source, keeps,
        )  # fmt: skip
        dispatcher.submit(ticket, loop)
        return ticket


def _lanes(settings: EngineSettings) -> tuple[SlotRows, Lanes, int, int]:
    """Make the slots and lanes; return them, a lane's places, and the searches that it queues."""
    device = backend.cuda_device(settings.device, settings.cuda_device)
    if device is not None:
        top_m_max = min(settings.top_m_max, CUDA_TOP_M_MAX)
        sizes = replace(settings.cuda, top_m_max=top_m_max, k_max=settings.k_max)
        on_device = CudaLanes(device, sizes, name="search-cuda")
        return on_device.slots, on_device, sizes.sizes[-1], 0
    count, spare_slots = thread_count(settings.lanes), settings.slots - settings.places
    slots = CpuSlots(settings.slots * count, top_m_max=settings.top_m_max, k_max=settings.k_max)
    lanes = CoreLanes(
        slots, count, places=settings.places, extends_max=settings.extends_max, name="search"
    )
    return slots, lanes, settings.places, min(settings.ahead, spare_slots // 2)
