"""Tables of rows whose columns are formats, for terminals and for pages of reports.

Columns map heads to formats of a row's fields, or to functions of a row. In a format the spec `.0G`
divides by 10^9.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter
from typing import Any

from rich.table import Table

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
