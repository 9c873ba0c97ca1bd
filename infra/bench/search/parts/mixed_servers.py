"""Three ways to serve searches that come one by one, for the mixed traffic of the search benchmark.

Our engine; static batches, the same kernels on the same index and threads, but each thread takes
what waits up to a full batch and answers all of it when its last search has ended; and hnswlib, one
call per query on as many threads.
"""

import asyncio
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from workers.search.engine.engine import EngineSettings, SearchEngine
from workers.search.index import inputs, ways
from workers.search.index.index import Index
from workers.search.index.kinds import Kind
from workers.search.index.query import Query
from workers.search.kernels.arrays import Array
from workers.search.walk import steps
from workers.search.walk.results import SlotReader
from workers.search.walk.slots import Slots

K, THREADS = 10, 2
PLACES = EngineSettings().places
TOP_M = {Kind.DECODE: 32, Kind.PREFILL: 128}


class Server(Protocol):
    """Serves one search at a time to many callers."""

    async def search(self, vector: Array, kind: Kind, deadline_ms: int | None) -> Array:
        """Rows of the nearest."""

    def places_used(self) -> tuple[int, int]:
        """Places in use and places, both summed over all rounds so far."""

    async def close(self) -> None: ...


class EngineAsItComes:
    """`SearchEngine` as it comes."""

    def __init__(self, index: Index) -> None:
        self.index, self.engine = index, SearchEngine(EngineSettings(lanes=THREADS))

    async def search(self, vector: Array, kind: Kind, deadline_ms: int | None) -> Array:
        query = Query(vector=vector, k=K, top_m=TOP_M[kind], kind=kind, deadline_ms=deadline_ms)
        return (await self.engine.search(self.index, query)).rows

    def places_used(self) -> tuple[int, int]:
        figures = self.engine.figures()
        return figures.places_used, figures.extends * PLACES

    async def close(self) -> None:
        await self.engine.close()


@dataclass(slots=True, eq=False)
class _Waiting:
    search: ways.Search
    reply: "asyncio.Future[Array]"


class StaticBatches:
    """Batches that complete as a whole; first come first served."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._used = [0] * THREADS
        self._rounds = [0] * THREADS
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    async def search(self, vector: Array, kind: Kind, deadline_ms: int | None) -> Array:
        view = self._index.view()
        prepared = inputs.prepared(vector, view.dim, view.metric)
        query = Query(vector=vector, k=K, top_m=TOP_M[kind], kind=kind)
        search = ways.new_search(view, ways.way(query, view), prepared)
        waiting = _Waiting(search, self._loop.create_future())
        self._inbox.put(waiting)
        return await waiting.reply

    def places_used(self) -> tuple[int, int]:
        return sum(self._used), sum(self._rounds) * PLACES

    async def close(self) -> None:
        for _ in self._threads:
            self._inbox.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _run(self, number: int) -> None:
        slots = Slots(PLACES, top_m_max=max(TOP_M.values()), k_max=K)
        reader = SlotReader(slots)
        while (first := self._inbox.get()) is not None:
            batch = [first]
            while len(batch) < PLACES and not self._inbox.empty():
                try:
                    another = self._inbox.get_nowait()
                except queue.Empty:
                    break
                if another is None:
                    self._inbox.put(None)
                    break
                batch.append(another)
            self._complete(slots, batch, number)
            answers = [ways.answered(w.search, slots, i, reader) for i, w in enumerate(batch)]
            rows = [answer.rows for answer in answers if answer is not None]
            self._loop.call_soon_threadsafe(_resolve, batch, rows)

    def _complete(self, slots: Slots, batch: Sequence[_Waiting], number: int) -> None:
        for slot, waiting in enumerate(batch):
            waiting.search.enter(slots, slot)
        active, finished = np.arange(len(batch)), np.empty(len(batch), np.int64)
        while len(active):
            ended, rounds = steps.advance(
                slots.fields, slots.top, slots.found, slots.visited, active, len(active),
                slots.tasks, finished, 1 << 30, slots.attention,
            )  # fmt: skip
            self._used[number] += rounds * len(active)
            self._rounds[number] += rounds
            active = np.setdiff1d(active, finished[:ended])


def _resolve(batch: Sequence[_Waiting], rows: Sequence[Array]) -> None:
    for waiting, found in zip(batch, rows, strict=True):
        if not waiting.reply.done():
            waiting.reply.set_result(found)


class Hnswlib:
    """One call per query. The length of the list belongs to an index, so there is one per class."""

    def __init__(self, index: Any, efforts: dict[Kind, int], folder: Path) -> None:
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

    async def search(self, vector: Array, kind: Kind, deadline_ms: int | None) -> Array:
        index = self._indexes[kind]
        return await self._loop.run_in_executor(self._threads, _one, index, vector)

    def places_used(self) -> tuple[int, int]:
        return 0, 0

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)


def _one(index: Any, vector: Array) -> Array:
    rows: Array = index.knn_query(vector, K, num_threads=1)[0][0]
    return rows
