"""Writes the report of each benchmark: build/bench/NAME.json.

It has the command, commit, machine, seed, load, figures and bars. A missed bar is printed, and does
not change the exit code. Also has the statistics that all benchmarks need. Measures nothing.
"""

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BENCH_DIR = Path("build/bench")
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A figure and its target. `value` is None if it could not be measured."""

    name: str
    value: float | None
    unit: str
    target: str
    met: bool


def at_least(name: str, value: float | None, target: float, unit: str = "") -> Bar:
    """Return a bar that is met if the value is at least `target`."""
    met = value is not None and value >= target
    return Bar(name=name, value=value, unit=unit, target=f">= {target:g}", met=met)


def at_most(name: str, value: float | None, target: float, unit: str = "") -> Bar:
    """Return a bar that is met if the value is at most `target`."""
    met = value is not None and value <= target
    return Bar(name=name, value=value, unit=unit, target=f"<= {target:g}", met=met)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the percentile, interpolated linearly; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles(
    values: Sequence[float], percents: Sequence[float] = (50, 99), prefix: str = "p"
) -> dict[str, float | None]:
    """Return several percentiles under the names `p50`, `p99` and so on."""
    return {f"{prefix}{percent:g}": percentile(values, percent) for percent in percents}


def number(value: float | None) -> str:
    """Format a number for tables: three significant digits or whole; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ratio(above: float | None, below: float | None) -> float | None:
    """Return the ratio of two values, or None if one is missing or the second is zero."""
    return above / below if above is not None and below else None


def median(values: Sequence[float | None]) -> float | None:
    """Return the median of the values that are not None."""
    return percentile([value for value in values if value is not None], 50)


def median_ratio(above: Sequence[float | None], below: Sequence[float | None]) -> float | None:
    """Return the median of the ratios of values that were measured side by side."""
    return median([ratio(a, b) for a, b in zip(above, below, strict=True)])


def median_difference(above: Sequence[float | None], below: Sequence[float | None]) -> float | None:
    """Return the median of the differences of values that were measured side by side."""
    return median(
        [None if a is None or b is None else a - b for a, b in zip(above, below, strict=True)]
    )


def nested(figures: Mapping[str, Any], levels: int = 2) -> dict[str, Any]:
    """Return the rows of nested figures: `{"a": {"b": row}}` becomes `{"a, b": row}`."""
    if levels == 1:
        return dict(figures)
    return {
        f"{name}, {label}": row
        for name, inner in figures.items()
        for label, row in nested(inner, levels - 1).items()
    }


def table(title: str, rows: Mapping[str, Any], *columns: str, caption: str = "") -> Table:
    """Return figures as a table with one row for each label.

    `columns` are names of figures, with dots for nested ones (`ttft_ms.p50`). By default they are
    all figures of the first row. A row that is a value and not a mapping has one column.
    """
    by_label = {
        name: row if isinstance(row, Mapping) else {"value": row} for name, row in rows.items()
    }
    columns = columns or tuple(next(iter(by_label.values()), {}))
    heads = (column.replace("_", " ").replace(".", " ") for column in columns)
    result = Table("", *heads, title=title, caption=caption or None)
    for label, row in by_label.items():
        result.add_row(label, *(cell(_figure(row, column)) for column in columns))
    return result


def _figure(row: Any, path: str) -> Any:
    """Return the figure at this path of names, or None if the row lacks it."""
    while path and isinstance(row, Mapping):
        name, path = (path, "") if path in row or "." not in path else path.split(".", 1)
        row = row.get(name)
    return row


def cell(value: Any) -> str:
    """Return a figure as the text of a table's cell."""
    match value:
        case bool():
            return "yes" if value else "no"
        case None | float():
            return number(value)
        case Mapping():
            return ", ".join(f"{name} {cell(figure)}" for name, figure in value.items())
        case list() | tuple():
            return ", ".join(map(cell, value))
    return str(value)


def machine() -> dict[str, Any]:
    """Return CPU, cores, memory, kernel, Python and load average of this machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """Return the checkout's commit, with `-dirty` if tracked files differ from it."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    root = Path(__file__).parents[2]
    ran = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def command_line() -> str:
    """Return the command line of this process."""
    main = sys.modules["__main__"].__spec__
    name = f"python -m {main.name}" if main else Path(sys.argv[0]).name
    return " ".join([name, *sys.argv[1:]])


def write_report(
    name: str,
    *,
    command: str,
    seed: int,
    load: dict[str, Any],
    figures: dict[str, Any],
    bars: Sequence[Bar],
    folder: Path = BENCH_DIR,
) -> Path:
    """Write the report to build/bench/NAME.json and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    content = {
        "name": name,
        "command": command,
        "commit": commit(),
        "machine": machine(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "load": load,
        "figures": figures,
        "bars": [asdict(bar) for bar in bars],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def show_bars(bars: Sequence[Bar], console: Console) -> None:
    """Print the bars as a table, and a sentence that names the missed ones."""
    table = Table("bar", "value", "target", "met", title="Bars")
    for bar in bars:
        value = "not measured" if bar.value is None else f"{bar.value:.3g} {bar.unit}".strip()
        table.add_row(bar.name, value, bar.target, "yes" if bar.met else "[bold red]no[/]")
    console.print(table)
    missed = [bar.name for bar in bars if not bar.met]
    if missed:
        console.print(f"{len(missed)} of {len(bars)} bars missed: {'; '.join(missed)}.")
    elif bars:
        console.print(f"All {len(bars)} bars met.")
