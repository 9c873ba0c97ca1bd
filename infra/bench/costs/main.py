"""Measures what a request and an idle stack cost: CPU time, wake-ups, records, bytes and memory.

`make bench-costs`, or `trivium bench costs`. A stack of simulated engines gets a fixed number of
requests in each cell. The benchmark counts the CPU time of every process and the records of every
topic until the last answer. Writes build/bench/costs.json. Tables show it beside `committed.json`
of this folder, the report of the last commit that changed a cost: a commit that changes a cost
copies its report there.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.bench.benchmark import Benchmark, BenchmarkResult, option
from infra.bench.log_counts import cost_of
from infra.bench.meters import CpuMeter, resident_mib, wakeups
from infra.bench.results import BENCH_DIR, number, table
from infra.bench.serving.cells import TOKENS, Generator, make_bodies
from infra.bench.serving.contenders import CONTEXT_TOKENS, MODEL, SIM
from infra.bench.serving.load_generator import OfferedLoad
from infra.bench.serving.sse_client import chat_body, chat_call
from infra.bench.stacks import HOST, make_stack, running
from infra.broker.node import Broker
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan

COMMITTED = Path(__file__).with_name("committed.json")
PLAN = StackPlan(prefill=0, decode=0, replica=1, retrieval=1, embedding=1, bridges=1)
Rows = dict[str, dict[str, float]]  # a figure by row and column
_LIMIT_S = 600.0
_HELD_TOKENS = 4_000  # of an open stream, which ends long after memory was measured
_KIB_OF_A_MIB = 1_024


@dataclass(frozen=True, slots=True)
class CostCell:
    """One load: requests over concurrent streams, with prompts of about `prompt_words` tokens."""

    name: str
    requests: int
    streams: int
    prompt_words: int = 64
    prompts: int = 32  # distinct ones


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """Sets the loads that the stack is measured under."""

    cells: tuple[CostCell, ...] = (
        CostCell("1 stream", 40, 1),
        CostCell("64 streams", 640, 64),
        CostCell("256 streams", 1_280, 256),
        CostCell("1 000-token prompts", 100, 4, 1_000),
        CostCell("100 000-token prompts", 10, 4, 100_000, 5),
    )
    warm_up: int = option(1_000, "requests before")
    idle_s: float = option(15.0, "seconds without a request")
    open_streams: int = option(256, "streams that are open at the same time", flag="held")
    seed: int = option(1)


class Costs:
    """Counts CPU time, records and memory of a running stack."""

    def __init__(self, stack: Stack, generator: Generator, options: CostOptions) -> None:
        self._stack, self._generator, self._options = stack, generator, options

    def _pids(self) -> dict[str, int]:
        ours = {row.name.rpartition("-")[0]: row.pid for row in self._stack.rows() if row.pid}
        broker = Broker(self._stack.settings.broker, self._stack.folder / "broker").status()
        return {"broker": broker.pid, **ours}

    async def ask(self, cell: CostCell) -> None:
        """Send all requests of a cell; raises RuntimeError if an answer is incomplete."""
        bodies = make_bodies(self._options.seed, words=cell.prompt_words, count=cell.prompts)
        figures = await self._generator.run(
            OfferedLoad(
                host=HOST,
                port=self._stack.settings.gateway.port,
                bodies=bodies,
                streams=cell.streams,
                requests_max=cell.requests,
                tokens=TOKENS,
                settle_s=0.0,
                window_s=_LIMIT_S,
            )
        )
        if figures["errors"] or figures["requests"] != cell.requests:
            raise RuntimeError(f"{cell.name}: {figures['requests']} answers, {figures['errors']}")

    async def cell(self, cell: CostCell) -> dict[str, Any]:
        """Return the cost of one request: CPU in ms by process, records and bytes by topic."""
        cost = await cost_of(self.ask(cell), self._stack.settings.log, self._pids())
        return {
            "cpu_ms": {name: 1e3 * s / cell.requests for name, s in sorted(cost.cpu_s.items())},
            "topics": {
                topic: {kind: value / cell.requests for kind, value in row.items()}
                for topic, row in cost.topics.items()
            },
        }

    async def idle(self) -> dict[str, dict[str, float]]:
        """Return cores used and wake-ups per second of an idle stack, by process."""
        pids, seconds = self._pids(), self._options.idle_s
        meter, before = CpuMeter(pids), {name: wakeups(pid) for name, pid in pids.items()}
        await asyncio.sleep(seconds)
        used_s = meter.used_s()
        return {
            name: {"cores": used_s[name] / seconds,
                   "wakeups_per_s": (wakeups(pid) - before[name]) / seconds}
            for name, pid in sorted(pids.items())
        }  # fmt: skip

    async def stream_kib(self) -> dict[str, float]:
        """Return the memory in KiB for each open stream, by process."""
        pids, count = self._pids(), self._options.open_streams
        before = {name: resident_mib(pid) for name, pid in pids.items()}
        async with AsyncExitStack() as streams:
            await asyncio.gather(*(self._open(streams, number) for number in range(count)))
            growth_mib = {name: resident_mib(pid) - before[name] for name, pid in pids.items()}
        return {name: _KIB_OF_A_MIB * mib / count for name, mib in sorted(growth_mib.items())}

    async def _open(self, streams: AsyncExitStack, number: int) -> None:
        """Open a stream and wait for its first token; raises RuntimeError."""
        port = self._stack.settings.gateway.port
        reader, writer = await asyncio.open_connection(HOST, port)
        streams.callback(writer.close)
        body = chat_body(MODEL, f"Question {number}", _HELD_TOKENS)
        writer.write(chat_call(HOST, port, body))
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"a stream that is to be held: {status.decode().strip()}")
        await reader.readuntil(b'"content"')


async def run(options: CostOptions, console: Console) -> BenchmarkResult:
    """Start a stack and measure idle costs, each cell and open streams."""
    stack = make_stack(PLAN, BENCH_DIR.absolute() / "costs", **SIM)
    model = replace(stack.settings.model, max_model_len=CONTEXT_TOKENS)
    stack.settings = replace(stack.settings, model=model)
    generator = await Generator.start()
    try:
        async with running(stack):
            costs = Costs(stack, generator, options)
            console.print(f"{options.warm_up} requests to warm up ...")
            await costs.ask(CostCell("warm-up", options.warm_up, 64))
            figures: dict[str, Any] = {"idle": await costs.idle(), "cells": {}}
            for cell in options.cells:
                console.print(f"{cell.name} ...")
                figures["cells"][cell.name] = await costs.cell(cell)
            console.print(f"{options.open_streams} streams are held ...")
            figures["held_kib"] = await costs.stream_kib()
    finally:
        await generator.stop()
    committed = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else None
    load = {"sim": SIM, "tokens": TOKENS, "context_tokens": CONTEXT_TOKENS}
    return BenchmarkResult(figures=figures, tables=tables(figures, committed), load=load)


def tables(figures: Mapping[str, Any], committed: Mapping[str, Any] | None) -> list[Table]:
    """Return tables of the figures, each beside the committed one."""
    before = committed["figures"] if committed else {}
    since = f" (before: {committed['commit'][:7]})" if committed else ""
    parts: list[tuple[str, Callable[[Mapping[str, Any]], Rows]]] = [
        ("CPU, ms per request", _cpu),
        ("Records per request", partial(_topics, "records")),
        ("Bytes per request", partial(_topics, "bytes")),
        ("Idle", _idle),
        ("KiB per held stream", _stream_kib),
    ]
    return [table(title + since, _beside(rows(figures), rows(before))) for title, rows in parts]


def _cpu(figures: Mapping[str, Any]) -> Rows:
    rows: Rows = {}
    for cell, costs in figures.get("cells", {}).items():
        for process, ms in (*costs["cpu_ms"].items(), ("all", sum(costs["cpu_ms"].values()))):
            rows.setdefault(process, {})[cell] = ms
    return rows


def _topics(kind: str, figures: Mapping[str, Any]) -> Rows:
    rows: Rows = {}
    for cell, costs in figures.get("cells", {}).items():
        for topic, counted in costs["topics"].items():
            rows.setdefault(topic, {})[cell] = counted[kind]
    return rows


def _idle(figures: Mapping[str, Any]) -> Rows:
    rows: Rows = dict(figures.get("idle", {}))
    if rows:
        columns = ("cores", "wakeups_per_s")
        rows["all"] = {column: sum(row[column] for row in rows.values()) for column in columns}
    return rows


def _stream_kib(figures: Mapping[str, Any]) -> Rows:
    return {process: {"KiB": kib} for process, kib in figures.get("held_kib", {}).items()}


def _beside(now: Rows, before: Rows) -> dict[str, dict[str, str]]:
    """Return figures as text, each with the committed one if there is one."""

    def text(figure: float | None, committed: float | None) -> str:
        return number(figure) if committed is None else f"{number(figure)} ({number(committed)})"

    columns = list(dict.fromkeys(column for row in now.values() for column in row))
    return {
        name: {head: text(row.get(head), before.get(name, {}).get(head)) for head in columns}
        for name, row in now.items()
    }


BENCHMARK = Benchmark(
    "costs",
    __doc__,
    run,
    full=CostOptions(),
    quick=CostOptions(
        cells=(CostCell("64 streams", 320, 64),), warm_up=320, idle_s=3.0, open_streams=64
    ),
    quick_help="one cell",
)
