"""Figures, tables and bars of the serving benchmark, from the cells that it measured. Pure."""

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
)
from infra.bench.serving.contenders import AIOHTTP, DIRECT, HTTPX, REMOTE, REPLICA

Cell = dict[str, Any]
Cells = dict[str, dict[float, list[Cell]]]  # by peer, then by streams or rate; one per repeat
Values = list[float | None]

_TIMES = ("ttft_ms", "gap_ms", "answer_ms")


def closed_figures(cells: Cells) -> dict[str, Any]:
    """Medians over the repeats, with every repeat's rate and times beside them."""
    return {
        name: {f"{load:g}": _figures(found) for load, found in by_load.items()}
        for name, by_load in cells.items()
    }


def open_figures(cells: Cells, keeps_up: Callable[[float, Cell], bool]) -> dict[str, Any]:
    """The same by rate, and the highest rate that a peer kept up with in every repeat."""
    found = closed_figures(cells)
    for name, by_rate in cells.items():
        kept = [r for r, got in by_rate.items() if all(keeps_up(r, cell) for cell in got)]
        found[name]["kept_up_to_per_s"] = max(kept, default=0)
    return found


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
    """Of all server processes, per request."""
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
    """What the project promises of this benchmark."""

    def rate_ratio(name: str, other: str, streams: int) -> float | None:
        return _ratio(cells, name, other, streams, lambda cell: cell["requests_per_s"])

    def ttft_ratio(name: str, other: str, streams: int) -> float | None:
        return _ratio(cells, name, other, streams, lambda cell: cell["ttft_ms"]["p50"])

    def ttft_added(name: str, streams: int) -> float | None:
        mine, theirs = _pair(cells, name, DIRECT, streams, lambda cell: cell["ttft_ms"]["p50"])
        return median_difference(mine, theirs)

    cpu_256 = _ratio(cells, REPLICA, AIOHTTP, 256, cpu_ms)
    over, under = "replica, {} streams: req/s over {}", "{}, {} streams: TTFT p50 over direct"
    return [
        at_least(over.format(64, HTTPX), rate_ratio(REPLICA, HTTPX, 64), 1.8, "x"),
        at_least(over.format(64, AIOHTTP), rate_ratio(REPLICA, AIOHTTP, 64), 0.97, "x"),
        at_most(under.format(REPLICA, 64), ttft_added(REPLICA, 64), 10, "ms"),
        at_least(over.format(256, HTTPX), rate_ratio(REPLICA, HTTPX, 256), 5, "x"),
        at_least(over.format(256, AIOHTTP), rate_ratio(REPLICA, AIOHTTP, 256), 1.2, "x"),
        at_most(
            "replica, 256 streams: TTFT p50 of aiohttp's",
            ttft_ratio(REPLICA, AIOHTTP, 256),
            0.6,
            "x",
        ),
        at_most("replica, 256 streams: server CPU per request of aiohttp's", cpu_256, 0.9, "x"),
        at_least(over.format(512, AIOHTTP), rate_ratio(REPLICA, AIOHTTP, 512), 1.5, "x"),
        at_most(under.format(REMOTE, 64), ttft_added(REMOTE, 64), 20, "ms"),
        at_least(
            "remote, 256 streams: req/s over aiohttp", rate_ratio(REMOTE, AIOHTTP, 256), 1.0, "x"
        ),
    ]


def _pair(
    cells: Cells, name: str, other: str, streams: int, value: Callable[[Cell], float | None]
) -> tuple[Values, Values]:
    """One value of two peers, repeat by repeat; empty where either was not measured."""
    mine = cells.get(name, {}).get(streams, [])
    theirs = cells.get(other, {}).get(streams, [])
    if len(mine) != len(theirs):
        return [], []
    return [value(cell) for cell in mine], [value(cell) for cell in theirs]


def _ratio(
    cells: Cells, name: str, other: str, streams: int, value: Callable[[Cell], float | None]
) -> float | None:
    return median_ratio(*_pair(cells, name, other, streams, value))


def closed_table(figures: dict[str, Any]) -> Table:
    """One line per number of streams and peer."""
    table = _table("Closed loop: medians of the repeats", "streams", figures)
    table.caption = "TTFT and token gap in ms; CPU of all server processes in ms per request."
    return table


def other_cpu_share(figures: dict[str, Any]) -> float | None:
    """Cores that processes outside a cell took while it was measured; the median of all cells."""
    return median([row["other_cpu_share"] for rows in figures.values() for row in rows.values()])


def cpu_table(figures: dict[str, Any]) -> Table:
    """Server CPU by process at the largest number of streams of each peer."""
    table = Table("streams", "peer", "ms per request", title="Server CPU by process")
    for name, rows in figures.items():
        streams = max(rows, key=float)
        processes = rows[streams]["cpu_ms_per_request_by_process"]
        texts = [f"{process} {_number(value)}" for process, value in processes.items()]
        table.add_row(streams, name, ", ".join(texts))
    return table


def open_table(figures: dict[str, Any]) -> Table:
    """One line per rate and peer."""
    by_rate = {
        name: {rate: row for rate, row in rows.items() if rate != "kept_up_to_per_s"}
        for name, rows in figures.items()
    }
    table = _table("Open loop: Poisson arrivals", "req/s asked", by_rate)
    kept = [f"{name} {rows['kept_up_to_per_s']:g}" for name, rows in figures.items()]
    table.caption = "Kept up with, in req/s: " + ", ".join(kept)
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
        _number(row["requests_per_s"]),
        f"{_number(row['ttft_ms_p50'])}/{_number(row['ttft_ms_p99'])}",
        f"{_number(row['gap_ms_p50'])}/{_number(row['gap_ms_p99'])}",
        _number(row["cpu_ms_per_request"]),
        ", ".join(f"{count} {kind}" for kind, count in row["errors"].items()) or "-",
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
