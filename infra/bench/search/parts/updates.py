"""Part of the search benchmark: stalls of the event loop during updates, and the cost of links.

Stalls are measured on an index of many rows, some of which are deleted: a view after a change, a
filter on it, a snapshot, a compaction, half as many rows again. Its rows lie on a line, so that its
graph needs no build. One metadata field has a different label in each row.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from infra.bench.results import Bar, at_most
from infra.bench.search.parts.lateness import watch_lateness
from infra.bench.search.scene import Progress, SearchOptions, SearchScene
from infra.bench.search.vectors import overlapping
from infra.processes import garbage
from workers.retrieval.worker import SWITCH_S
from workers.vector.engine.engine import SearchEngine
from workers.vector.filters.filters import EqualFilter
from workers.vector.index import snapshot
from workers.vector.index.index import LINK_BATCH, Index
from workers.vector.index.query import Query
from workers.vector.kernels.arrays import Array

_DIM = 64  # of rows on a line
DEAD_SHARE = 0.15
_LABELS, _PAYLOAD_BYTES = 8, 100
_CHANGES, _CAME = 20, 500
STALL_MS = 5.0


def updates(scene: SearchScene) -> tuple[dict[str, Any], list[Bar]]:
    """Measure linking and stalls while rows come and go."""
    options, progress = scene.options, scene.progress
    links = [_link_cost(options, rows, progress) for rows in options.linked_rows]
    progress(f"updates of an index of {options.updated_rows} rows")
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    with garbage.deferred_gc():
        stalls = asyncio.run(_stalls(_on_a_line(options.updated_rows)))
    sys.setswitchinterval(before_s)
    figures = {"rows": options.updated_rows, "stalls_ms": stalls, "links": links}
    worst = max(stall["held_ms"] for name, stall in stalls.items() if name != "nothing")
    return figures, [at_most("longest that the event loop was held up", worst, STALL_MS, "ms")]


def _link_cost(options: SearchOptions, rows: int, progress: Progress) -> dict[str, Any]:
    """Return the CPU time to link a batch of rows to an index, one thread."""
    progress(f"rows are linked to {rows}")
    batches = options.linked_batches
    vectors, _ = overlapping(rows + batches * LINK_BATCH, 0, dim=options.dim, seed=options.seed)
    index = Index.build(vectors[:rows])
    index.upsert(range(rows, len(vectors)), vectors[rows:])
    index.threads, times = 1, []
    for _ in range(batches):
        before = time.process_time()
        index.link()
        times.append(time.process_time() - before)
    cpu_s = median(times)
    return {"rows": rows, "batch_cpu_s": round(cpu_s, 4), "rows_per_cpu_s": LINK_BATCH / cpu_s}


def _on_a_line(rows: int) -> Index:
    """Return an index of linked rows with metadata and payloads, some of them deleted."""
    vectors = np.zeros((rows, _DIM), np.float32)
    vectors[:, 0] = np.arange(rows)
    metadata: list[dict[str, Any]] = [
        {"part": str(row % _LABELS), "year": row % 50, "page": f"page {row}"} for row in range(rows)
    ]
    payloads = [bytes([row % 256]) * _PAYLOAD_BYTES for row in range(rows)]
    index = Index(_DIM, graph_of=_line)
    index.upsert(list(range(rows)), vectors, metadata, payloads)
    index.link()
    index.delete(range(0, rows, round(1 / DEAD_SHARE)))
    return index


def _line(
    vectors: Array, degree: int, metric: int, stored: int, *, seed: int, threads: int
) -> Array:
    """Return a graph: half of the edges lead to the next rows, the others ever farther."""
    rows, half = len(vectors), degree // 4
    near = np.arange(1, half + 1)
    far = np.unique(np.geomspace(half + 1, rows // 2, degree // 2 - half).astype(np.int64))
    steps = np.concatenate([near, -near, far, -far, np.zeros(degree - 2 * half - 2 * len(far))])
    edges = np.clip(np.arange(rows)[:, None] + steps.astype(np.int64), 0, rows - 1)
    graph: Array = edges.astype(np.uint32)
    return graph


async def _stalls(index: Index) -> dict[str, dict[str, float]]:
    engine, where = SearchEngine(), EqualFilter("part", "3")
    query = Query(vector=np.full(_DIM, 7.0))
    await engine.search(index, query)

    async def nothing() -> None:
        await asyncio.sleep(1)

    async def change(query: Query) -> None:
        for number in range(_CHANGES):
            vector = np.full((1, _DIM), number, np.float32)
            await asyncio.to_thread(index.upsert, [number], vector, [{"part": "3"}])
            await engine.search(index, query)

    def save() -> None:
        with tempfile.TemporaryDirectory() as folder:
            snapshot.save(index, Path(folder) / "index")

    def grow() -> None:
        count = index.rows.count
        for first in range(count, count + count // 2, _CAME):
            vectors = np.zeros((_CAME, _DIM), np.float32)
            vectors[:, 0] = np.arange(first, first + _CAME)
            metadata = [{"part": "3", "page": f"more {row}"} for row in range(first, first + _CAME)]
            index.upsert([f"more {row}" for row in range(first, first + _CAME)], vectors, metadata)

    work: dict[str, Callable[[], Awaitable[Any]]] = {
        "nothing": nothing,
        "upserts": lambda: change(query),
        "filtered": lambda: change(Query(vector=query.vector, where=where)),
        "snapshot": lambda: asyncio.to_thread(save),
        "link": lambda: asyncio.to_thread(index.link),
        "audit": lambda: asyncio.to_thread(index.missed_share),
        "compaction": lambda: asyncio.to_thread(index.compact),
        "growth": lambda: asyncio.to_thread(grow),
    }
    index.threads = 1
    figures = {}
    for name, operation in work.items():
        async with watch_lateness() as lateness:
            await operation()
        figures[name] = lateness.figures()
    await engine.close()
    return figures
