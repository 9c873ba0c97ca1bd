"""Three servers of searches that arrive one by one, for the mixed traffic of the search benchmark.

They are our engine; static batches on the engine's own lanes, so that only the policy differs: a
lane takes the waiting searches, up to a full batch, and the next batch when the last of them has
ended; and hnswlib, one call per query on the same number of threads.
"""

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from workers.vector.engine.core_lanes import CoreLanes
from workers.vector.engine.engine import EngineSettings, SearchEngine
from workers.vector.index import inputs, plans
from workers.vector.index.index import Index
from workers.vector.index.kinds import SearchKind
from workers.vector.index.query import Query
from workers.vector.kernels.arrays import Array
from workers.vector.traversal.results import SlotReader
from workers.vector.traversal.slots import CpuSlots

K, THREADS = 10, 2
PLACES = EngineSettings().places  # searches that a lane of ours advances together
BATCH = 12  # of static batches
_ROOM = 16  # slots of a lane: a power of two, at least a batch
TOP_M = {SearchKind.DECODE: 32, SearchKind.PREFILL: 128}


class SearchServer(Protocol):
    """Serves one search at a time to many callers."""

    async def search(self, vector: Array, kind: SearchKind, deadline_ms: int | None) -> Array:
        """Return the row ids of the nearest vectors."""

    def places_used(self) -> tuple[int, int]:
        """Return the places in use and all places, both summed over all rounds so far."""

    async def close(self) -> None: ...


class EngineServer:
    """Serves searches with our `SearchEngine`, unchanged."""

    def __init__(self, index: Index) -> None:
        self.index, self.engine = index, SearchEngine(EngineSettings(lanes=THREADS))

    async def search(self, vector: Array, kind: SearchKind, deadline_ms: int | None) -> Array:
        query = Query(vector=vector, k=K, top_m=TOP_M[kind], kind=kind, deadline_ms=deadline_ms)
        return (await self.engine.search(self.index, query)).rows

    def places_used(self) -> tuple[int, int]:
        figures = self.engine.stats()
        return figures.places_used, figures.extends * PLACES

    async def close(self) -> None:
        await self.engine.close()


@dataclass(slots=True, eq=False)
class _PendingSearch:
    search: plans.PreparedSearch
    reply: "asyncio.Future[Array]"


class StaticBatches:
    """Batches that complete as a whole, first come first served, on the engine's own lanes.

    A lane whose batch has ended takes the waiting searches, up to a full batch. All else is the
    engine's: threads that never take the GIL, kernels, slots, bell.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        slots = CpuSlots(THREADS * _ROOM, top_m_max=max(TOP_M.values()), k_max=K)
        sizes = {"places": BATCH, "extends_max": EngineSettings().extends_max}
        self._slots, self._reader = slots, SlotReader(slots)
        self._lanes = CoreLanes(slots, THREADS, **sizes, name="static")
        self._waiting: deque[_PendingSearch] = deque()
        self._batches: list[dict[int, _PendingSearch]] = [{} for _ in range(THREADS)]  # by slot
        self._finished_slots: list[list[int]] = [[] for _ in range(THREADS)]
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._lanes.bell, self._on_bell)
        self._is_due = False

    async def search(self, vector: Array, kind: SearchKind, deadline_ms: int | None) -> Array:
        view = self._index.view()
        prepared = inputs.prepare(vector, view.dim, view.metric)
        query = Query(vector=vector, k=K, top_m=TOP_M[kind], kind=kind)
        search = plans.new_search(view, plans.plan_search(query, view), prepared)
        waiting = _PendingSearch(search, self._loop.create_future())
        self._waiting.append(waiting)
        if not self._is_due and not all(self._batches):
            self._is_due = True  # searches of this iteration of the loop start together
            self._loop.call_soon(self._begin)
        return await waiting.reply

    def places_used(self) -> tuple[int, int]:
        figures = self._lanes.stats()
        return figures.places_used, figures.extends * BATCH

    async def close(self) -> None:
        self._loop.remove_reader(self._lanes.bell)
        await asyncio.to_thread(self._lanes.close)

    def _begin(self) -> None:
        """Start the waiting searches on every lane without a batch."""
        self._is_due = False
        for lane, batch in enumerate(self._batches):
            if not batch:
                for slot in range(lane * _ROOM, lane * _ROOM + min(BATCH, len(self._waiting))):
                    batch[slot] = self._waiting.popleft()
                    self._lanes.start(slot, batch[slot].search)

    def _on_bell(self) -> None:
        """Start waiting searches on the lanes that are free, then answer the ended batches."""
        over = []
        for slot in self._lanes.collect_ended():
            self._finished_slots[slot // _ROOM].append(slot)
        for lane, slots in enumerate(self._finished_slots):
            if slots and len(slots) == len(self._batches[lane]):
                over.append(self._batches[lane])
                self._batches[lane], self._finished_slots[lane] = {}, []
        results = [self._reader.read(list(batch)) for batch in over]
        self._begin()
        for batch, hits in zip(over, results, strict=True):
            for waiting, hit in zip(batch.values(), hits, strict=True):
                assert hit is not None, "no walk over these data finds less than is wanted"
                if not waiting.reply.done():
                    waiting.reply.set_result(plans.answer(waiting.search, hit).rows)


class Hnswlib:
    """One call per query. An index has one length of the list, so each class has its own index."""

    def __init__(self, index: Any, efforts: dict[SearchKind, int], folder: Path) -> None:
        import hnswlib

        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "hnswlib.bin"
        index.save_index(str(path))
        self._indexes = {}
        for kind, effort in efforts.items():
            self._indexes[kind] = hnswlib.Index("l2", index.dim)
            self._indexes[kind].load_index(str(path))
            self._indexes[kind].set_ef(effort)
        path.unlink()
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(THREADS)

    async def search(self, vector: Array, kind: SearchKind, deadline_ms: int | None) -> Array:
        index = self._indexes[kind]
        return await self._loop.run_in_executor(self._threads, _search_one, index, vector)

    def places_used(self) -> tuple[int, int]:
        return 0, 0

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)


def _search_one(index: Any, vector: Array) -> Array:
    rows: Array = index.knn_query(vector, K, num_threads=1)[0][0]
    return rows
