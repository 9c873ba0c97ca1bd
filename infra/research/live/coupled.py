"""Trinity's placements (a) and (c) live: the same load on the same cores of this machine.

There are two LLM workers with simulated engines, each pinned to half of the cores. In (a) a
retrieval worker with a whole copy of the index is pinned beside each of them, in the same place,
which gets its probes; in (c) one retrieval worker serves both from all cores. Both are reached over
the log, as all retrieval workers are, so the hops that (a) would save are not measured here: only
the costs and the benefit of copies are.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.bench.benchmark import progress_on
from infra.bench.meters import CpuMeter
from infra.bench.results import BENCH_DIR, number
from infra.bench.retrieval.loads import IDLE, PATIENCE_S, SATURATED, ChatLoad
from infra.bench.retrieval.scene import RetrievalOptions, scene_on
from infra.bench.stacks import make_stack
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan, core_shares

LLM_WORKERS = 2
COPIES = {"a": LLM_WORKERS, "c": 1}  # copies of the index


async def compare(
    console: Console, *, rate: float, load_s: float, fillers: int, seed: int
) -> dict[str, Any]:
    """Measure both placements, one after the other, and return their figures by name."""
    figures_by_way = {}
    options = RetrievalOptions(rates=(rate,), load_s=load_s, fillers=fillers, seed=seed)
    with progress_on(console):
        for placement, copies in COPIES.items():
            plan = StackPlan(
                prefill=0, decode=0, replica=LLM_WORKERS, retrieval=copies, embedding=1,
                places=copies,
            )  # fmt: skip
            stack = make_stack(plan, BENCH_DIR.absolute() / f"coupled-{placement}")
            async with scene_on(stack, options, PATIENCE_S) as scene:
                pin(stack, placement)
                pids = retrieval_pids(stack)
                meter = CpuMeter(pids)
                load = ChatLoad(scene)
                await load.prepare()
                ingest_cpu_s = meter.used_s()
                (rows,) = (await load.latency()).values()
                figures_by_way[placement] = figures(rows, pids.values(), ingest_cpu_s)
    return figures_by_way


def retrieval_pids(stack: Stack) -> dict[str, int]:
    """Return the process ids of the stack's retrieval workers, by name."""
    return {
        name: process.pid
        for name, process in stack.processes.items()
        if name.startswith("retrieval-")
    }


def pin(stack: Stack, placement: str) -> None:
    """Pin each LLM worker to its share of the cores, and in (a) a retrieval worker with it."""
    shares = core_shares(sorted(os.sched_getaffinity(0)), LLM_WORKERS)
    for place, cores in enumerate(shares):
        names = [f"replica-{place}"] + ([f"retrieval-{place}"] if placement == "a" else [])
        for name in names:
            pin_process(stack.processes[name].pid, cores)


def pin_process(
    pid: int,
    cores: Iterable[int],
    set_affinity: Callable[[int, Iterable[int]], None] = os.sched_setaffinity,
) -> None:
    """Pin all present threads of a process; threads that they start inherit this."""
    core_set = set(cores)
    for task in Path(f"/proc/{pid}/task").iterdir():
        set_affinity(int(task.name), core_set)


def memory_mib(pid: int) -> float:
    """Return a process's memory in MiB: its own, and its share of shared pages."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    line = next(text for text in rollup.splitlines() if text.startswith("Pss:"))
    return int(line.split()[1]) / 1024


def figures(
    rows: dict[str, Any], pids: Iterable[int], ingest_cpu_s: dict[str, float]
) -> dict[str, Any]:
    """Return the figures of one placement."""
    return {
        "copies": len(ingest_cpu_s),
        "memory_mib": sum(map(memory_mib, pids)),
        "taking_in_cpu_s": sum(ingest_cpu_s.values()),
        "ttft_ms": {when: rows[when]["ttft_ms"]["with"] for when in (IDLE, SATURATED)},
        "without_ms": {when: rows[when]["ttft_ms"]["without"] for when in (IDLE, SATURATED)},
        "search_ms": {when: rows[when]["search_ms"] for when in (IDLE, SATURATED)},
    }


def table(figures_by_way: dict[str, Any]) -> Table:
    """Return a table with a row for each figure."""
    rich_table = Table(
        "", *(f"({placement})" for placement in figures_by_way), title="Live, on the same cores"
    )
    rich_table.add_row(
        "copies of the index", *(str(row["copies"]) for row in figures_by_way.values())
    )
    for name, field in (("memory, MiB", "memory_mib"), ("CPU s to take in", "taking_in_cpu_s")):
        rich_table.add_row(name, *(number(row[field]) for row in figures_by_way.values()))
    for when in (IDLE, SATURATED):
        for name, pick in _TIMES.items():
            cells = [_both(pick(row, when)) for row in figures_by_way.values()]
            rich_table.add_row(f"{name}, {when}", *cells)
    return rich_table


_TIMES: dict[str, Callable[[dict[str, Any], str], dict[str, float | None]]] = {
    "TTFT with a search p50/p99, ms": lambda row, when: row["ttft_ms"][when],
    "TTFT without": lambda row, when: row["without_ms"][when],
    "a prompt's search": lambda row, when: row["search_ms"][when]["prefill"],
    "one of decode's queue": lambda row, when: row["search_ms"][when]["decode"],
}


def _both(spread: dict[str, float | None]) -> str:
    return f"{number(spread['p50'])} / {number(spread['p99'])}"
