"""Plots the serving benchmark: rate, first token and CPU by streams, and the open loop."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # after the choice of the backend
from matplotlib.axes import Axes

_COLOURS = {
    "direct": "0.5",
    "httpx": "tab:red",
    "aiohttp": "tab:orange",
    "replica": "tab:blue",
    "remote": "tab:green",
}


def plot(figures: dict[str, Any], path: Path) -> None:
    """Draw the picture and write it to `path`."""
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    closed, open_loop = figures["closed_loop"], figures["open_loop"]
    _lines(axes[0][0], closed, "requests_per_s", "requests per s", "streams")
    _lines(axes[0][1], closed, "ttft_ms_p50", "first token, p50 (p99 dashed), ms", "streams")
    _lines(axes[0][1], closed, "ttft_ms_p99", "", "streams", dashed=True)
    _lines(axes[1][0], closed, "cpu_ms_per_request", "server CPU per request, ms", "streams")
    _lines(axes[1][1], open_loop, "ttft_ms_p50", "first token, p50 (p99 dashed), ms", "req/s asked")
    _lines(axes[1][1], open_loop, "ttft_ms_p99", "", "req/s asked", dashed=True)
    for axis in (axes[0][0], axes[0][1], axes[1][0]):
        axis.set_xscale("log", base=2)
    for axis in (axes[0][1], axes[1][0], axes[1][1]):
        axis.set_yscale("log")
    axes[0][0].legend()
    figure.suptitle("Same simulated engine: 20 ms prefill, 5 ms per token, 64 tokens")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _lines(
    axis: Axes, figures: dict[str, Any], key: str, label: str, load: str, *, dashed: bool = False
) -> None:
    for name, rows in figures.items():
        points = [
            (float(value), row[key])
            for value, row in rows.items()
            if isinstance(row, dict) and row[key] is not None
        ]
        points.sort()
        style = "--" if dashed else "o-"
        axis.plot(
            [x for x, _ in points],
            [y for _, y in points],
            style,
            color=_COLOURS[name],
            label=None if dashed else name,
            alpha=0.6 if dashed else 1.0,
        )
    if not dashed:
        axis.set_xlabel(load)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
