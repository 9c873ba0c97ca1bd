"""Computes figures, tables and bars of the serving benchmark from its cells. Pure."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from infra.bench.plot import Panel, points
from infra.bench.results import (
    Bar,
    at_least,
    at_most,
    median,
    median_difference,
    median_ratio,
    table,
)
from infra.bench.serving.contenders import AIOHTTP, DIRECT, HTTPX, REMOTE, REPLICA

Cell = dict[str, Any]
Cells = dict[str, dict[float, list[Cell]]]  # by peer, then by streams or rate; one per repeat
Values = list[float | None]

_MEDIANS = ("requests_per_s", "tokens_per_read", "client_cpu_share", "other_cpu_share")
_TIMES = ("ttft_ms", "gap_ms", "answer_ms")
_COLUMNS = ("requests_per_s", "ttft_ms_p50", "ttft_ms_p99", "gap_ms_p50", "gap_ms_p99",
            "cpu_ms_per_request", "errors")  # fmt: skip
_KEPT_UP = "kept_up_to_per_s"


def closed_figures(cells: Cells) -> dict[str, Any]:
    """Return medians over the repeats, and the rate and times of each repeat."""
    return {
        name: {f"{load:g}": _figures(repeats) for load, repeats in by_load.items()}
        for name, by_load in cells.items()
    }


def open_figures(cells: Cells, keeps_up: Callable[[float, Cell], bool]) -> dict[str, Any]:
    """Return medians by rate, and the highest rate that a peer kept up with in every repeat."""
    rows = closed_figures(cells)
    for name, by_rate in cells.items():
        rates = [r for r, got in by_rate.items() if all(keeps_up(r, cell) for cell in got)]
        rows[name][_KEPT_UP] = max(rates, default=0)
    return rows


def _figures(cells: Sequence[Cell]) -> dict[str, Any]:
    processes = sorted({name for cell in cells for name in cell["cpu_ms"]})
    figures: dict[str, Any] = {
        "requests": sum(cell["requests"] for cell in cells),
        "errors": dict(sum((Counter(cell["errors"]) for cell in cells), Counter())),
        "cpu_ms_per_request": median([cpu_ms(cell) for cell in cells]),
        "cpu_ms_per_request_by_process": {
            name: median([cell["cpu_ms"].get(name) for cell in cells]) for name in processes
        },
        **{name: median([cell[name] for cell in cells]) for name in _MEDIANS},
    }
    for kind in _TIMES:
        for percent in ("p50", "p90", "p99"):
            figures[f"{kind}_{percent}"] = median([cell[kind][percent] for cell in cells])
    figures["repeats"] = [
        {name: cell[name] for name in ("requests_per_s", "ttft_ms", "gap_ms")}
        | {"cpu_ms_per_request": cpu_ms(cell)}
        for cell in cells
    ]
    return figures


def cpu_ms(cell: Cell) -> float | None:
    """Return the CPU time of all server processes per request."""
    return sum(cell["cpu_ms"].values()) if cell["cpu_ms"] else None


def bars(cells: Cells) -> list[Bar]:
    """Return the bars that the project promises for this benchmark."""

    def over(name: str, rival: str, streams: int, times: float) -> Bar:
        pair = _pair(cells, name, rival, streams, lambda cell: cell["requests_per_s"])
        label = f"{name}, {streams} streams: req/s over {rival}"
        return at_least(label, median_ratio(*pair), times, "x")

    def added(name: str, streams: int, limit_ms: float) -> Bar:
        pair = _pair(cells, name, DIRECT, streams, _ttft_ms)
        label = f"{name}, {streams} streams: TTFT p50 over direct"
        return at_most(label, median_difference(*pair), limit_ms, "ms")

    def share(what: str, value: Callable[[Cell], float | None], limit: float) -> Bar:
        pair = _pair(cells, REPLICA, AIOHTTP, 256, value)
        return at_most(
            f"replica, 256 streams: {what} of aiohttp's", median_ratio(*pair), limit, "x"
        )

    return [
        over(REPLICA, HTTPX, 64, 1.8),
        over(REPLICA, AIOHTTP, 64, 0.97),
        added(REPLICA, 64, 10),
        over(REPLICA, HTTPX, 256, 5),
        over(REPLICA, AIOHTTP, 256, 1.2),
        share("TTFT p50", _ttft_ms, 0.6),
        share("server CPU per request", cpu_ms, 0.9),
        over(REPLICA, AIOHTTP, 512, 1.5),
        added(REMOTE, 64, 20),
        over(REMOTE, AIOHTTP, 256, 1.0),
    ]


def _ttft_ms(cell: Cell) -> float | None:
    p50_ms: float | None = cell["ttft_ms"]["p50"]
    return p50_ms


def _pair(
    cells: Cells, name: str, rival: str, streams: int, value: Callable[[Cell], float | None]
) -> tuple[Values, Values]:
    """Return one value of two peers by repeat; empty if their numbers of repeats differ."""
    peer_cells = cells.get(name, {}).get(streams, [])
    rival_cells = cells.get(rival, {}).get(streams, [])
    if len(peer_cells) != len(rival_cells):
        return [], []
    return [value(cell) for cell in peer_cells], [value(cell) for cell in rival_cells]


def other_cpu_share(figures: dict[str, Any]) -> float | None:
    """Return the cores that other processes used during a cell; the median of all cells."""
    return median([row["other_cpu_share"] for rows in figures.values() for row in rows.values()])


def tables(closed: dict[str, Any], open_loop: dict[str, Any]) -> list[Table]:
    """Return tables of both loops by load and peer, and of the CPU at each peer's most streams."""
    last = {name: rows[max(rows, key=float)] for name, rows in closed.items()}
    cpu = {name: {"cpu_ms": row["cpu_ms_per_request_by_process"]} for name, row in last.items()}
    rates = ", ".join(f"{name} {rows[_KEPT_UP]:g}" for name, rows in open_loop.items())
    kept_up = f"Kept up with, in req/s: {rates}"
    return [
        table("Closed loop by streams: medians of the repeats", _by_load(closed), *_COLUMNS),
        table("Server CPU per request at most streams, by process", cpu),
        table("Open loop: Poisson arrivals per s", _by_load(open_loop), *_COLUMNS, caption=kept_up),
    ]


def _by_load(figures: dict[str, Any]) -> dict[str, Any]:
    loads = {load for rows in figures.values() for load in rows if load != _KEPT_UP}
    return {
        f"{load}, {name}": rows[load]
        for load in sorted(loads, key=float)
        for name, rows in figures.items()
        if load in rows
    }


def panels(closed: dict[str, Any], open_loop: dict[str, Any]) -> list[Panel]:
    """Return the panels of the plot: rates, times and CPU by streams, and the open loop."""

    def curves(figures: dict[str, Any], *keys: str) -> dict[str, list[tuple[float, float]]]:
        return {
            f"{name} {key[-3:]}" if len(keys) > 1 else name: points(
                {load: row for load, row in rows.items() if load != _KEPT_UP}, key
            )
            for name, rows in figures.items()
            for key in keys
        }

    ttft, first = ("ttft_ms_p50", "ttft_ms_p99"), "first token, ms"
    cpu = curves(closed, "cpu_ms_per_request")
    return [
        Panel("streams", "requests per s", curves(closed, "requests_per_s"), log="x"),
        Panel("streams", first, curves(closed, *ttft), log="xy"),
        Panel("streams", "server CPU per request, ms", cpu, log="xy"),
        Panel("req/s asked", first, curves(open_loop, *ttft), log="y"),
    ]
