"""Part of the search benchmark: continuous ingestion into an empty index, beside searches.

Documents go through a retrieval worker's own collections and upkeep, without the log. They arrive
at a fixed rate, and the feed waits if linking is slower. Callers that always search show how much
of the engine's capacity is left. After every step the feed pauses, and the same callers search
alone.

On a shared machine wall times mean little, so CPU time is reported too. The cost of a step's rows
is its CPU time less that of its searches at their cost alone. It includes scans of rows without
edges. Two cores that spend 70 % on searches have the rest for rows.
"""

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infra.bench.results import Bar, at_least, at_most
from infra.bench.search.parts.lateness import watch_lateness
from infra.bench.search.parts.updates import STALL_MS
from infra.bench.search.scene import Progress, SearchOptions, SearchScene
from infra.bench.search.vectors import drawer, recall, truth
from infra.processes import garbage
from schemas.records import Document
from schemas.retrieval import pack_vector
from workers.retrieval.collections import Collections
from workers.retrieval.feed.documents import DocumentFollower
from workers.retrieval.passages.changes import DocumentChange
from workers.retrieval.settings import RetrievalSettings
from workers.retrieval.upkeep import Upkeep
from workers.retrieval.worker import SWITCH_S
from workers.vector.engine.engine import SearchEngine
from workers.vector.index.index import Index
from workers.vector.index.query import Effort, Query
from workers.vector.kernels.arrays import Array

SEARCH_SHARE = 0.7
_CORES = 2
_NAME, _LABELS = "ingest", 8
_CALLERS, _QUERIES, _ASKED_AT_END = 16, 1_000, 200
_K, _TOP_M = 10, 64


def ingest(scene: SearchScene) -> tuple[dict[str, Any], list[Bar]]:
    """Ingest rows beside searches; returns figures and bars."""
    options, progress = scene.options, scene.progress
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    with garbage.deferred_gc():
        figures = asyncio.run(_measure(options, progress))
    sys.setswitchinterval(before_s)
    steps = figures["steps"]
    held_ms = max(step["beside"]["held_ms"] for step in steps)
    return figures, [
        at_least(
            "rows/s of those that were to come, slowest step",
            min(step["rows_per_s"] for step in steps) / options.ingest_per_s, 0.98,
        ),
        at_least(
            "searches beside ingest, of those alone, slowest step",
            min(step["search_share"] for step in steps), SEARCH_SHARE,
        ),
        at_most("longest that the event loop was held up", held_ms, STALL_MS, "ms"),
    ]  # fmt: skip


@dataclass(slots=True)
class _Callers:
    """Callers that each search again as soon as they have an answer."""

    engine: SearchEngine
    queries: Array
    search_count: int = 0

    @asynccontextmanager
    async def asking(self, index: Index) -> AsyncIterator["_Phase"]:
        """Run the callers until the block ends."""
        phase = _Phase()
        tasks = [asyncio.create_task(self._ask(index, first)) for first in range(_CALLERS)]
        async with watch_lateness() as lateness:
            self.search_count, began_s, cpu_s = 0, time.perf_counter(), time.process_time()
            yield phase
            phase.elapsed_s = time.perf_counter() - began_s
            phase.cpu_s, phase.searches = time.process_time() - cpu_s, self.search_count
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        phase.lateness = lateness.figures()

    async def _ask(self, index: Index, number: int) -> None:
        while True:
            vector = self.queries[number % len(self.queries)]
            await self.engine.search(index, Query(vector=vector, k=_K, top_m=_TOP_M))
            number += _CALLERS
            self.search_count += 1


@dataclass(slots=True)
class _Phase:
    """Searches, times and lateness of one phase."""

    elapsed_s: float = 0.0
    cpu_s: float = 0.0  # of the process
    searches: int = 0
    lateness: dict[str, Any] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """Return the rates, the cores in use, and the lateness of the loop."""
        return {
            "searches_per_s": round(self.searches / self.elapsed_s),
            "cores": round(self.cpu_s / self.elapsed_s, 2),
            **self.lateness,
        }


async def _measure(options: SearchOptions, progress: Progress) -> dict[str, Any]:
    async with watch_lateness() as idle:
        await asyncio.sleep(options.ingest_alone_s)
    settings = RetrievalSettings()
    collections, engine = Collections(settings), SearchEngine()
    draw_raw = drawer(dim=options.dim, seed=options.seed)

    def draw(count: int) -> Array:  # of unit length, as a collection's metric is cosine
        vectors = draw_raw(count)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors

    callers, near = _Callers(engine, draw(_QUERIES)), _Nearest(draw(_ASKED_AT_END))
    collections.linked = asyncio.Event()
    upkeep = asyncio.create_task(Upkeep(settings, collections, engine.neighbours).run())
    steps, alone = list[dict[str, Any]](), None
    for first in range(0, options.ingest_rows, options.ingest_step):
        progress(f"ingest from {first} of {options.ingest_rows} rows")
        vectors = draw(min(options.ingest_step, options.ingest_rows - first))
        near.add(vectors)
        step, alone = await _step(options, collections, callers, _changes(vectors, first), alone)
        steps.append(step)
        progress(
            f"{step['rows_per_s']} rows/s beside {step['search_share']:.0%} of searches, "
            f"{step['row_cpu_us']} CPU us a row"
        )
    index = collections.get(_NAME)
    rows, _ = index.search(near.queries, Effort(k=_K, top_m=_TOP_M))
    upkeep.cancel()
    with suppress(asyncio.CancelledError):
        await upkeep
    await engine.close()
    return {
        "per_s": options.ingest_per_s, "idle": idle.figures(), "steps": steps,
        "held_back_s": round(collections.held_back_ms / 1_000, 1),
        "recall": round(recall(rows, near.rows()), 4), "k": _K, "top_m": _TOP_M,
    }  # fmt: skip


async def _step(
    options: SearchOptions, collections: Collections, callers: _Callers,
    changes: Sequence[DocumentChange], before: _Phase | None,
) -> tuple[dict[str, Any], _Phase]:  # fmt: skip
    """Feed the rows while callers search, then let them search alone; return figures, and the
    phase alone."""
    size = DocumentFollower.batch_max
    gc.freeze()  # the collector skips future documents, which a worker would not have yet
    parts = [changes[at : at + size] for at in range(0, len(changes), size)]
    if _NAME not in collections.indexes:
        collections.apply(parts.pop(0))
    index = collections.get(_NAME)
    count = index.rows.count
    async with callers.asking(index) as beside:
        began_s, fed = time.monotonic(), 0
        for part in parts:
            await asyncio.sleep(began_s + fed / options.ingest_per_s - time.monotonic())
            fed += len(part)
            await collections.wait_for_room()
            async with collections.change_lock:
                await asyncio.to_thread(collections.apply, part)
    added_rows = index.rows.count - count
    assert collections.linked is not None
    while index.loose:
        collections.linked.clear()
        await collections.linked.wait()
    async with callers.asking(index) as alone:
        await asyncio.sleep(options.ingest_alone_s)
    cpu_s = [phase.cpu_s / phase.searches for phase in (before, alone) if phase is not None]
    row_cpu_s = (beside.cpu_s - beside.searches * float(np.mean(cpu_s))) / added_rows
    rate = alone.searches / alone.elapsed_s
    return {
        "rows": index.rows.count,
        "rows_per_s": round(added_rows / beside.elapsed_s),
        "row_cpu_us": round(1e6 * row_cpu_s, 1),
        "rows_per_s_by_cpu": round(_CORES * (1 - SEARCH_SHARE) / max(row_cpu_s, 1e-9)),
        "search_share": round(beside.searches / beside.elapsed_s / rate, 3),
        "search_cpu_us": round(1e6 * alone.cpu_s / alone.searches, 1),
        "entries": len(index.entries),
        "beside": beside.figures(),
        "alone": alone.figures(),
    }, alone


def _changes(vectors: Array, first: int) -> list[DocumentChange]:
    """Return the vectors as document changes, as a worker reads them from the log."""
    return [
        DocumentChange(_NAME, str(number), Document(
            document_id=str(number), collection=_NAME, vector=pack_vector(vector), at_ms=0,
            metadata=f'{{"part": "{number % _LABELS}"}}',
        ))
        for number, vector in enumerate(vectors, first)
    ]  # fmt: skip


class _Nearest:
    """Finds the exact nearest rows of some queries among rows that are added in blocks."""

    def __init__(self, queries: Array) -> None:
        self.queries, self._count = queries, 0
        self._rows, self._distances = list[Array](), list[Array]()

    def add(self, vectors: Array) -> None:
        rows = truth(vectors, self.queries, _K)
        differences = vectors[rows].astype(np.float64) - self.queries[:, None]
        self._rows.append(rows + self._count)
        self._distances.append((differences**2).sum(2))
        self._count += len(vectors)

    def rows(self) -> Array:
        """Return the nearest rows of each query, shape (queries, k)."""
        order = np.argsort(np.hstack(self._distances), axis=1)[:, :_K]
        nearest: Array = np.take_along_axis(np.hstack(self._rows), order, 1)
        return nearest
