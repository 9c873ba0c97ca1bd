"""Pages of reports: templates of this folder, with tables of formatted rows and embedded plots.

A table's columns map heads to formats of a row's fields, or to functions of a row. In a format the
spec `.0G` divides by 10^9.
"""

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from string import Formatter
from types import ModuleType
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.table import Table

from schemas.errors import ConfigError

Columns = Mapping[str, str | Callable[[Any], Any]]


class _CellFormatter(Formatter):
    """Formats the fields of a row, which is an object, a mapping or a sequence."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        row: Any = args[0]
        is_item = isinstance(key, int) or isinstance(row, Mapping)
        return row[key] if is_item else getattr(row, str(key))

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except KeyError:  # such as a level of load that was not run
            return "", field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if value == "":
            return ""
        if isinstance(value, bool):
            return "yes" if value else "no"
        if format_spec.endswith("G"):
            return format(value / 1e9, f"{format_spec[:-1]}f")
        return format(value, format_spec)


_FORMATTER = _CellFormatter()


def cells(row: Any, columns: Columns) -> list[str]:
    """Return the texts of a row's cells."""
    return [
        _FORMATTER.vformat(show, (row,), {}) if isinstance(show, str) else str(show(row))
        for show in columns.values()
    ]


def terminal_table(rows: Iterable[Any], columns: Columns, title: str = "") -> Table:
    """Return the rows as a table for a terminal."""
    table = Table(*columns, box=None, title=title or None)
    for row in rows:
        table.add_row(*cells(row, columns))
    return table


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
