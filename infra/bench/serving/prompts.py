"""Measures what a request costs as its prompt grows: CPU by process, and bytes by topic.

A part of the serving benchmark, for the peers that have a log. Sends a few requests at a time, each
with a different prompt, so that no cache helps. Subtracts the CPU time of idle processes.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from infra.bench.log_counts import cost_of
from infra.bench.meters import CpuMeter
from infra.bench.results import Bar, at_most, table
from infra.bench.serving.cells import Generator, make_bodies
from infra.bench.serving.contenders import REPLICA, ServingPeer
from infra.bench.serving.load_generator import OfferedLoad
from infra.bench.stacks import HOST
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
    cost = await cost_of(generator.run(load), peer.log, peer.pids())
    return {
        "requests": cost.result["requests"],
        "errors": cost.result["errors"],
        "ttft_ms_p50": cost.result["ttft_ms"]["p50"],
        "cpu_ms": {
            process: 1e3 * max(0.0, s - idle.get(process, 0.0) * cost.elapsed_s) / REQUESTS
            for process, s in sorted(cost.cpu_s.items())
        },
        "bytes": {topic: row["bytes"] / REQUESTS for topic, row in cost.topics.items()},
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
    rows = {}
    for name, by_words in figures.items():
        shortest = by_words[min(by_words, key=int)]["bytes"]
        for words, row in by_words.items():
            sizes = {topic: size for topic, size in row["bytes"].items()
                     if size > 2 * shortest.get(topic, 0.0)}  # fmt: skip
            sizes["rest"] = sum(row["bytes"].values()) - sum(sizes.values())
            rows[f"{words}, {name}"] = {**row, "bytes": sizes}
    caption = "For each request: ms, and bytes before compression."
    return table("Prompts by their words", rows, "ttft_ms_p50", "cpu_ms", "bytes", caption=caption)
