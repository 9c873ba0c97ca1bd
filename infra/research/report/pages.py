"""Pages of reports: templates of this folder, with tables of rows and embedded plots."""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from infra.terminal.tables import cells
from schemas.errors import ConfigError


def render(template: str, pictures: Mapping[str, bytes] | None = None, **context: Any) -> str:
    """Return the page of a template, with PNG files embedded by name."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.globals["cells_of"] = lambda rows, columns: [cells(row, columns) for row in rows]
    environment.filters["theory"] = _theory
    encoded = {name: base64.b64encode(data).decode() for name, data in (pictures or {}).items()}
    return environment.get_template(template).render(pictures=encoded, **context)


def _theory(study: ModuleType) -> str:
    """Return how a study explains itself, in its module's docstring."""
    return (study.__doc__ or "").strip()


def draw_png(draw: Callable[..., None], *results: Any, tall: bool = False) -> bytes:
    """Draw one figure as a PNG file; `draw` gets the figure and `results`."""
    try:
        import matplotlib
        import matplotlib.pyplot as pyplot
    except ImportError as error:
        raise ConfigError(
            "evaluate: the report's pictures need matplotlib; install the extra `dev`"
        ) from error
    matplotlib.use("Agg")
    figure = pyplot.figure(figsize=(9, 7.2 if tall else 3.6), layout="constrained")
    draw(figure, *results)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot.close(figure)
    return buffer.getvalue()


def panels(figure: Any, titles: Sequence[str], columns: int = 3) -> Iterator[tuple[str, Any]]:
    """Yield each title with axes of its own."""
    for number, title in enumerate(titles, 1):
        axes = figure.add_subplot(-(-len(titles) // columns), columns, number)
        axes.set_title(title, fontsize=9)
        yield title, axes


def draw_bars(
    axes: Any,
    names: Sequence[str],
    values: Mapping[str, Sequence[float]],
    y: str,
    rotation: int = 0,
) -> None:
    """Draw groups of bars; `values` has one for each name, by label."""
    width = 0.8 / len(values)
    for number, (text, heights) in enumerate(values.items()):
        shift = width * (number - (len(values) - 1) / 2)
        places = [at + shift for at in range(len(names))]
        axes.bar(places, heights, width, label=text, color=COLOURS[number])
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks(range(len(names)), names, rotation=rotation, fontsize=7)
    mark(axes, y=y, legend=True)


def mark(axes: Any, x: str = "", y: str = "", log: str = "", *, legend: bool = False) -> None:
    """Name the axes; `log` has those with a logarithmic scale, x to base 2."""
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    if "x" in log:
        axes.set_xscale("log", base=2)
    if "y" in log:
        axes.set_yscale("log")
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


COLOURS = ("#9aa5b1", "#1f6feb", "#9ecbff", "#8250df", "#bf8700", "#1a7f37")
