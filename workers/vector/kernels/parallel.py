"""Runs a compiled kernel over ranges of rows on several threads.

Kernels release the interpreter's lock and write to their own rows only, so the result does not
depend on the number of threads.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CHUNKS_PER_THREAD = 4


def thread_count(threads: int = 0) -> int:
    """Return `threads`, or if it is 0, the number of cores that this process may use."""
    return threads or len(os.sched_getaffinity(0))


def over_rows(
    kernel: Callable[..., Any], rows: int, *args: Any, threads: int = 0,
    chunks_per_thread: int = CHUNKS_PER_THREAD,
) -> list[Any]:  # fmt: skip
    """Call `kernel(first, last, *args)` over all rows; return the results in order of rows.

    `threads` 0: all cores. Raises the kernel's errors, after all chunks have ended.
    """
    count = min(thread_count(threads), max(1, rows))
    if count == 1:
        return [kernel(0, rows, *args)]
    chunks = min(rows, count * chunks_per_thread)
    bounds = [rows * i // chunks for i in range(chunks + 1)]
    with ThreadPoolExecutor(count) as pool:
        tasks = [
            pool.submit(kernel, first, last, *args)
            for first, last in zip(bounds, bounds[1:], strict=False)
        ]
        return [task.result() for task in tasks]
