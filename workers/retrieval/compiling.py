"""Compiles a retrieval worker's kernels: `python -m workers.retrieval.compiling`, at set-up.

Compiled code is stored beside its source until that changes (`kernels/jit.py`). Without this step
the first worker compiles it, for 20 s, before it is ready.
"""

import asyncio

import numpy as np

from workers.vector.engine.engine import EngineSettings, SearchEngine
from workers.vector.index.index import Index
from workers.vector.index.query import Query

ROWS, DIM = 1_200, 16  # enough rows that a graph is built


async def search_once() -> None:
    """Search rows without edges, link them, and search along the edges."""
    engine = SearchEngine(EngineSettings(lanes=1))
    try:
        index = Index(DIM)
        vectors = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
        index.upsert(list(range(ROWS)), vectors)
        await engine.search(index, Query(vector=vectors[0]))
        await asyncio.to_thread(index.link)
        await engine.search(index, Query(vector=vectors[0]))
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(search_once())
