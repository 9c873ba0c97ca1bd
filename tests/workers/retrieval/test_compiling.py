"""What set-up compiles, so that the first retrieval worker need not."""

from pathlib import Path
from typing import Any

from workers.retrieval import compiling
from workers.vector import kernels
from workers.vector.engine import lane_loop

SEARCH = Path(kernels.__file__).parents[1]


async def test_setup_writes_compiled_code_beside_source() -> None:
    await compiling.search_once()
    cached_kernels = {path.name.partition("-")[0] for path in SEARCH.rglob("*.nbi")}
    assert {
        "lane_loop.serve",
        "steps.advance",
        "codes.encode_query",
        "results._read_all",
    } <= cached_kernels
    called: Any = (lane_loop.start, lane_loop.tell)
    assert all(kernel.signatures for kernel in called)
