"""Part of the search benchmark: searches of decode and of prefill through one server, open loop.

`mixed_arrivals.py` makes the traffic. The capacity of a server is the rate at which it answers
callers that always have searches in flight. Open loops then send Poisson arrivals at shares of our
engine's capacity, independent of the server. Each rate has several runs, the servers in turns, and
medians count, since on a shared machine one stall of milliseconds decides a run's 99th percentile.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from infra.bench.results import BENCH_DIR, Bar, at_least, at_most, percentile, ratio
from infra.bench.search.parts.mixed_arrivals import MixedTraffic, TrafficCell, in_all
from infra.bench.search.parts.mixed_servers import (
    TOP_M,
    EngineServer,
    Hnswlib,
    K,
    SearchServer,
    StaticBatches,
)
from infra.bench.search.scene import SearchScene
from infra.bench.search.systems import OURS
from infra.processes import garbage
from workers.vector.index.kinds import SearchKind

_UNLOADED_PER_S, _WARM_UP_S = 100, 0.3
DECODE_P99_MS = 3.0
_HIGH = 0.8  # of our capacity: the load at which tails are compared
_OF_CPU = ("cpu_us_per_search", "loop_us_per_search")
_LADDER = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384)


def mixed(scene: SearchScene) -> tuple[dict[str, Any], list[Bar]]:
    """Run part 4: capacities, and times under load."""
    index = scene.system(OURS).index
    makers: dict[str, Callable[[], SearchServer]] = {
        OURS: lambda: EngineServer(index),
        "static batches": lambda: StaticBatches(index),
    }
    efforts: dict[SearchKind, int] = {}
    if "hnswlib" in scene.names:
        peer = scene.system("hnswlib")
        efforts = _equal_efforts(scene)
        folder = BENCH_DIR / "search"
        makers["hnswlib per query"] = lambda: Hnswlib(peer.index, efforts, folder)
    figures: dict[str, Any] = asyncio.run(_measure(scene, makers))
    figures["hnswlib_efforts"] = {str(kind): effort for kind, effort in efforts.items()}
    return figures, _bars(figures)


def _equal_efforts(scene: SearchScene) -> dict[SearchKind, int]:
    """Return the lowest effort with which hnswlib has about our recall, by class."""
    efforts = {}
    for kind, top_m in TOP_M.items():
        target = scene.point(OURS, top_m, queries_max=500).recall - 0.005
        points = (scene.point("hnswlib", effort, queries_max=500) for effort in _LADDER)
        efforts[kind] = next((p.effort for p in points if p.recall >= target), _LADDER[-1])
    return efforts


async def _measure(
    scene: SearchScene, makers: dict[str, Callable[[], SearchServer]]
) -> dict[str, Any]:
    servers = {name: make() for name, make in makers.items()}
    traffic = {
        name: MixedTraffic(s, scene.queries, scene.options.seed) for name, s in servers.items()
    }
    for driver in traffic.values():
        await driver.closed(_WARM_UP_S)
    with garbage.deferred_gc():  # as in a retrieval worker: a full collection takes 30-40 ms
        figures = await _figures(scene, traffic)
    for server in servers.values():
        await server.close()
    return {"servers": figures, "k": K, "top_m": {str(k): m for k, m in TOP_M.items()}}


async def _figures(scene: SearchScene, traffic: dict[str, MixedTraffic]) -> dict[str, Any]:
    seconds, closed = scene.options.load_s, {name: list[dict[str, Any]]() for name in traffic}
    for repeat in range(scene.options.repeats):
        for name, driver in traffic.items():
            scene.progress(f"mixed traffic: capacity of {name}, repeat {repeat + 1}")
            closed[name].append((await driver.closed(max(0.3, seconds / 2))).figures())
    figures: dict[str, Any] = {name: _capacity(runs) for name, runs in closed.items()}
    unloaded = await _runs(scene, traffic, _UNLOADED_PER_S, 2 * seconds)
    for name in traffic:
        figures[name] |= {"unloaded": unloaded[name], "loads": {}}
    for share in scene.options.load_shares:
        rate_per_s = share * figures[OURS]["capacity_per_s"]
        able = {  # without servers that this rate would overload by far
            name: driver
            for name, driver in traffic.items()
            if rate_per_s <= 1.2 * figures[name]["capacity_per_s"]
        }
        for name, row in (await _runs(scene, able, rate_per_s, seconds)).items():
            figures[name]["loads"][str(share)] = row
    return figures


def _capacity(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return capacities and CPU times of several closed loops. On a machine with other load only
    the CPU times mean much."""
    rates = [run["searches_per_s"] for run in runs]
    minima = {key: min(run[key] for run in runs) for key in _OF_CPU}
    return {"capacities_per_s": rates, "capacity_per_s": percentile(rates, 50), **minima}


async def _runs(
    scene: SearchScene, traffic: dict[str, MixedTraffic], rate_per_s: float, seconds: float
) -> dict[str, dict[str, Any]]:
    """Run an open loop on each server in turns, `seconds` in all; return figures by server."""
    scene.progress(f"mixed traffic: {', '.join(traffic)} at {rate_per_s:.0f} searches/s")
    runs, cells = scene.options.load_runs, {name: list[TrafficCell]() for name in traffic}
    for _ in range(runs):
        for name, driver in traffic.items():
            cells[name].append(await driver.open(rate_per_s, seconds / runs))
    return {name: in_all(server_cells) for name, server_cells in cells.items()}


def _kept_up_to(servers: dict[str, Any], name: str, decode_ms: float) -> float:
    """Return the highest rate with decode's p99 within `decode_ms` and 99 % of prefill in time."""
    return max(
        (
            row["asked_per_s"]
            for row in servers[name]["loads"].values()
            if row["decode_ms_p99"] is not None and row["decode_ms_p99"] <= decode_ms
            and row["prefill_misses"] <= 0.01 * (row["prefill_searches"] + row["prefill_misses"])
        ),
        default=0.0,
    )  # fmt: skip


def _at(server: dict[str, Any], share: str, figure: str) -> float | None:
    """Return a figure at a share of our capacity, or None if that load was not measured."""
    value: float | None = server["loads"].get(share, {}).get(figure)
    return value


def _bars(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars. On a CPU, continuous batching improves tails and deadlines. A batch that
    shrinks wastes no core there, so the capacity must only be no lower."""
    servers = figures["servers"]
    ours, static = servers[OURS], servers["static batches"]
    for name, row in servers.items():
        row["kept_up_to_per_s"] = _kept_up_to(servers, name, DECODE_P99_MS)
    capacity = ours["capacity_per_s"]
    shares = [
        share for share in ours["loads"] if share in static["loads"] and float(share) <= _HIGH
    ]
    highest = max(shares, key=float, default="")
    p99s = [_at(server, highest, "decode_ms_p99") for server in (static, ours)]
    load = f"{float(highest):.0%}" if highest else "any load"
    misses = _at(ours, str(_HIGH), "prefill_misses")
    bars = [
        at_most("decode p99 at 60 % of capacity", _at(ours, "0.6", "decode_ms_p99"),
                DECODE_P99_MS, "ms"),
        at_least(f"decode p99 of static batches at {load} of our capacity, of ours", ratio(*p99s),
                 2, "times"),
        at_most("prefill deadlines missed at 80 %", misses, 0, "searches"),
        at_least("capacity, of static batches'", ratio(capacity, static["capacity_per_s"]), 1,
                 "times"),
    ]  # fmt: skip
    if (peer := servers.get("hnswlib per query")) is not None:
        of_peer = ratio(capacity, peer["capacity_per_s"])
        bars.append(at_least("capacity, of hnswlib's called per query", of_peer, 1, "times"))
    return bars
