"""Measures what a request costs as its prompt grows: CPU by process, and bytes by topic.

A part of the serving benchmark, for the peers that have a log. Sends a few requests at a time, each
with a different prompt, so that no cache helps. Subtracts the CPU time of idle processes.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from infra.bench.cpu_time import CpuMeter
from infra.bench.log_counts import SETTLE_S, counts, end_offsets
from infra.bench.results import Bar, at_most, number
from infra.bench.serving.cells import Generator, make_bodies
from infra.bench.serving.contenders import HOST, REPLICA, ServingPeer
from infra.bench.serving.load_generator import OfferedLoad
from infra.stack.plan import WORKER_ROLES

REQUESTS, STREAMS, TOKENS = 20, 4, 20
LONGEST = 100_000
CPU_MS_MAX = 120
_IDLE_S = 8.0  # over which idle CPU time is measured
_LIMIT_S = 600.0

Figures = dict[str, dict[str, Any]]  # by peer, then by the prompt's words


async def prompt_figures(
    peers: Mapping[str, ServingPeer], generator: Generator, words: Sequence[int], seed: int
) -> Figures:
    """Return the figures of each peer with a log, by prompt length."""
    logged = {name: peer for name, peer in peers.items() if peer.log is not None}
    meters = {name: CpuMeter(peer.pids()) for name, peer in logged.items()}
    await asyncio.sleep(_IDLE_S)
    idle = {name: {process: s / _IDLE_S for process, s in meter.used_s().items()}
            for name, meter in meters.items()}  # fmt: skip
    return {
        name: {
            str(count): await _figures(peer, generator, idle[name], count, seed) for count in words
        }
        for name, peer in logged.items()
    }


async def _figures(
    peer: ServingPeer, generator: Generator, idle: Mapping[str, float], words: int, seed: int
) -> dict[str, Any]:
    assert peer.log is not None
    load = OfferedLoad(
        host=HOST,
        port=peer.port,
        bodies=make_bodies(seed, words=words, count=REQUESTS, tokens=TOKENS),
        streams=STREAMS,
        requests_max=REQUESTS,
        tokens=TOKENS,
        settle_s=0.0,
        window_s=_LIMIT_S,
    )
    before, meter, began_s = await end_offsets(peer.log), CpuMeter(peer.pids()), time.monotonic()
    cell = await generator.run(load)
    await asyncio.sleep(SETTLE_S)
    used_s, elapsed_s = meter.used_s(), time.monotonic() - began_s
    topic_counts = await counts(peer.log, before, await end_offsets(peer.log))
    return {
        "requests": cell["requests"],
        "errors": cell["errors"],
        "ttft_ms_p50": cell["ttft_ms"]["p50"],
        "cpu_ms": {
            process: 1e3 * max(0.0, s - idle.get(process, 0.0) * elapsed_s) / REQUESTS
            for process, s in sorted(used_s.items())
        },
        "bytes": {topic: row["bytes"] / REQUESTS for topic, row in topic_counts.items()},
    }


def prompt_bars(figures: Figures) -> list[Bar]:
    """Return the bar for the CPU of a long prompt outside the worker."""
    row = figures.get(REPLICA, {}).get(str(LONGEST))
    ours = None if row is None else [ms for name, ms in row["cpu_ms"].items()
                                     if name not in WORKER_ROLES]  # fmt: skip
    label = f"replica, prompts of {LONGEST} words: CPU but for the worker"
    return [at_most(label, None if ours is None else sum(ours), CPU_MS_MAX, "ms")]


def prompt_table(figures: Figures) -> Table:
    """Return a table by peer and length, with the bytes of topics that grow with the prompt."""
    table = Table("words", "peer", "TTFT p50", "CPU", "bytes", title="Prompts by their length")
    table.caption = "For each request: ms, and bytes before compression."
    for name, rows in figures.items():
        shortest = min(rows, key=int)
        for words, row in rows.items():
            cpu = [f"{process} {number(ms)}" for process, ms in row["cpu_ms"].items()]
            sizes = {topic: size for topic, size in row["bytes"].items()
                     if size > 2 * rows[shortest]["bytes"].get(topic, 0.0)}  # fmt: skip
            cells = [f"{topic} {number(size)}" for topic, size in sizes.items()]
            rest = number(sum(row["bytes"].values()) - sum(sizes.values()))
            ttft = number(row["ttft_ms_p50"])
            table.add_row(words, name, ttft, ", ".join(cpu), ", ".join([*cells, f"rest {rest}"]))
        table.add_section()
    return table
