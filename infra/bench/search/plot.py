"""Plots the search benchmark: recall against rate, time against load, places in use."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # after the choice of the backend
from matplotlib.axes import Axes


def plot(figures: dict[str, Any], path: Path) -> None:
    """Draw the parts that were measured and write the picture to `path`."""
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    if "speed" in figures:
        _recall(axes[0][0], figures["speed"]["curves"])
    if "mixed" in figures:
        servers = figures["mixed"]["servers"]
        _loads(axes[0][1], servers, "decode_ms_p99", "decode p99, ms")
        axes[0][1].set_yscale("log")
        _loads(axes[1][0], servers, "occupancy", "share of places in use")
    if "scheduler" in figures:
        step, of_step = next(iter(figures["scheduler"]["at"].items()))
        _misses(axes[1][1], {name: of_step["variants"][name] for name in of_step["shown"]}, step)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
        elif not axis.has_data():
            axis.set_title("not measured")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _recall(axis: Axes, curves: dict[str, Any]) -> None:
    for name, points in curves.items():
        axis.plot(
            [point["recall"] for point in points],
            [point["queries_per_s"] for point in points],
            "o-",
            label=name,
        )
    axis.set_yscale("log")
    axis.set_xlabel("recall@10")
    axis.set_ylabel("queries per s, one thread")


def _loads(axis: Axes, servers: dict[str, Any], key: str, label: str) -> None:
    for name, server in servers.items():
        rows = [row for row in server["loads"].values() if row[key] is not None]
        if rows:
            axis.plot(
                [row["asked_per_s"] for row in rows], [row[key] for row in rows], "o-", label=name
            )
    axis.set_xlabel("searches per s asked, 4 of 5 decode's")
    axis.set_ylabel(label)


def _misses(axis: Axes, variants: dict[str, Any], step: str) -> None:
    prefill = [row["prefill_misses"] for row in variants.values()]
    decode = [row["decode_misses"] for row in variants.values()]
    axis.barh(list(variants), prefill, label="prefill")
    axis.barh(list(variants), decode, left=prefill, label="decode")
    axis.set_xlabel(f"misses, simulated; {step}")
