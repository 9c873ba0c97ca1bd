"""Computes figures, tables and bars of the serving benchmark from its cells. Pure."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from infra.bench.results import (
    Bar,
    at_least,
    at_most,
    median,
    median_difference,
    median_ratio,
    number,
)
from infra.bench.serving.contenders import AIOHTTP, DIRECT, HTTPX, REMOTE, REPLICA

Cell = dict[str, Any]
Cells = dict[str, dict[float, list[Cell]]]  # by peer, then by streams or rate; one per repeat
Values = list[float | None]

_TIMES = ("ttft_ms", "gap_ms", "answer_ms")


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
        rows[name]["kept_up_to_per_s"] = max(rates, default=0)
    return rows


def _figures(cells: Sequence[Cell]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "requests": sum(cell["requests"] for cell in cells),
        "errors": _errors(cells),
        "requests_per_s": median([cell["requests_per_s"] for cell in cells]),
        "cpu_ms_per_request": median([cpu_ms(cell) for cell in cells]),
        "cpu_ms_per_request_by_process": _by_process(cells),
        "tokens_per_read": median([cell["tokens_per_read"] for cell in cells]),
        "client_cpu_share": median([cell["client_cpu_share"] for cell in cells]),
        "other_cpu_share": median([cell["other_cpu_share"] for cell in cells]),
    }
    for kind in _TIMES:
        for percent in ("p50", "p90", "p99"):
            figures[f"{kind}_{percent}"] = median([cell[kind][percent] for cell in cells])
    figures["repeats"] = [
        {
            "requests_per_s": cell["requests_per_s"],
            "ttft_ms": cell["ttft_ms"],
            "gap_ms": cell["gap_ms"],
            "cpu_ms_per_request": cpu_ms(cell),
        }
        for cell in cells
    ]
    return figures


def cpu_ms(cell: Cell) -> float | None:
    """Return the CPU time of all server processes per request."""
    return sum(cell["cpu_ms"].values()) if cell["cpu_ms"] else None


def _errors(cells: Sequence[Cell]) -> dict[str, int]:
    total: dict[str, int] = {}
    for cell in cells:
        for kind, count in cell["errors"].items():
            total[kind] = total.get(kind, 0) + count
    return total


def _by_process(cells: Sequence[Cell]) -> dict[str, float | None]:
    names = {name for cell in cells for name in cell["cpu_ms"]}
    return {name: median([c["cpu_ms"].get(name) for c in cells]) for name in sorted(names)}


def bars(cells: Cells) -> list[Bar]:
    """Return the bars that the project promises for this benchmark."""

    def over(name: str, rival: str, streams: int, times: float) -> Bar:
        ratio = _ratio(cells, name, rival, streams, lambda cell: cell["requests_per_s"])
        return at_least(f"{name}, {streams} streams: req/s over {rival}", ratio, times, "x")

    def added(name: str, streams: int, limit_ms: float) -> Bar:
        peer_ms, direct_ms = _pair(cells, name, DIRECT, streams, _ttft_ms)
        label = f"{name}, {streams} streams: TTFT p50 over direct"
        return at_most(label, median_difference(peer_ms, direct_ms), limit_ms, "ms")

    def share(what: str, value: Callable[[Cell], float | None], limit: float) -> Bar:
        ratio = _ratio(cells, REPLICA, AIOHTTP, 256, value)
        return at_most(f"replica, 256 streams: {what} of aiohttp's", ratio, limit, "x")

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


def _ratio(
    cells: Cells, name: str, rival: str, streams: int, value: Callable[[Cell], float | None]
) -> float | None:
    return median_ratio(*_pair(cells, name, rival, streams, value))


def closed_table(figures: dict[str, Any]) -> Table:
    """Return the closed loops as a table: one row per number of streams and peer."""
    table = _table("Closed loop: medians of the repeats", "streams", figures)
    table.caption = "TTFT and token gap in ms; CPU of all server processes in ms per request."
    return table


def other_cpu_share(figures: dict[str, Any]) -> float | None:
    """Return the cores that other processes used during a cell; the median of all cells."""
    return median([row["other_cpu_share"] for rows in figures.values() for row in rows.values()])


def cpu_table(figures: dict[str, Any]) -> Table:
    """Return a table of server CPU by process at the largest number of streams of each peer."""
    table = Table("streams", "peer", "ms per request", title="Server CPU by process")
    for name, rows in figures.items():
        streams = max(rows, key=float)
        processes = rows[streams]["cpu_ms_per_request_by_process"]
        texts = [f"{process} {number(value)}" for process, value in processes.items()]
        table.add_row(streams, name, ", ".join(texts))
    return table


def open_table(figures: dict[str, Any]) -> Table:
    """Return the open loops as a table: one row per rate and peer."""
    by_rate = {
        name: {rate: row for rate, row in rows.items() if rate != "kept_up_to_per_s"}
        for name, rows in figures.items()
    }
    table = _table("Open loop: Poisson arrivals", "req/s asked", by_rate)
    rates = [f"{name} {rows['kept_up_to_per_s']:g}" for name, rows in figures.items()]
    table.caption = "Kept up with, in req/s: " + ", ".join(rates)
    return table


def _table(title: str, load: str, figures: dict[str, Any]) -> Table:
    table = Table(title=title)
    for column in (load, "peer", "req/s", "TTFT p50/p99", "gap p50/p99", "CPU", "errors"):
        table.add_column(column, justify="left" if column in ("peer", "errors") else "right")
    loads = sorted({value for rows in figures.values() for value in rows}, key=float)
    for value in loads:
        for name, rows in figures.items():
            if value in rows:
                table.add_row(value, name, *_row(rows[value]))
        table.add_section()
    return table


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        number(row["requests_per_s"]),
        f"{number(row['ttft_ms_p50'])}/{number(row['ttft_ms_p99'])}",
        f"{number(row['gap_ms_p50'])}/{number(row['gap_ms_p99'])}",
        number(row["cpu_ms_per_request"]),
        ", ".join(f"{count} {kind}" for kind, count in row["errors"].items()) or "-",
    )
