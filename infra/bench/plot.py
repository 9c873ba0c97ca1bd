"""Plots curves of figures, in panels of one picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # after the choice of the backend

_COLUMNS = 2


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves of one panel: points (x, y) by label. Curves whose label ends with ` p99`
    are dashed, in the colour of their name's other curve."""

    x: str
    y: str
    curves: Mapping[str, Sequence[tuple[Any, Any]]]
    log: str = ""  # axes with a logarithmic scale


def points(rows: Mapping[str, Any], y: str, x: str = "") -> list[tuple[float, float]]:
    """Return the points of a curve: figure `y` of each row, at figure `x` or at the row's name."""
    pairs = [(float(name) if not x else row[x], row[y]) for name, row in rows.items()]
    return sorted(pair for pair in pairs if None not in pair)


def plot(path: Path, panels: Sequence[Panel], title: str = "") -> None:
    """Draw the panels and write the picture to `path`."""
    rows = -(-len(panels) // _COLUMNS)
    figure, axes = pyplot.subplots(
        rows, _COLUMNS, figsize=(11, 4 * rows), squeeze=False, constrained_layout=True
    )
    for axis, panel in zip(axes.flat, panels, strict=False):
        colours: dict[str, Any] = {}
        curves = {label: curve for label, curve in panel.curves.items() if curve}
        for label, curve in curves.items():
            name, _, percentile = label.partition(" p")
            style = "--" if percentile == "99" else "o-"
            (line,) = axis.plot(*zip(*curve, strict=True), style, label=label,
                                color=colours.get(name))  # fmt: skip
            colours.setdefault(name, line.get_color())
        if "x" in panel.log:
            axis.set_xscale("log", base=2)
        if "y" in panel.log:
            axis.set_yscale("log")
        axis.set(xlabel=panel.x, ylabel=panel.y)
        axis.grid(alpha=0.3)
        if curves:
            axis.legend(fontsize="small")
        else:
            axis.set_title("not measured")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
