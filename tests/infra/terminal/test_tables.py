"""Tables of rows whose columns are formats."""

from dataclasses import dataclass

from infra.terminal.tables import Columns, cells, terminal_table


@dataclass
class Row:
    """A row with a nested field."""

    name: str
    good: bool
    moved_bytes: int
    by_level: dict[str, float]


ROW = Row("x=0", True, 12_300_000_000, {"low": 1.25})


def test_cells_format_fields_flags_and_billions() -> None:
    columns: Columns = {"a": "{name}, {good}", "b": "{moved_bytes:.1G}", "c": lambda row: row.good}
    assert cells(ROW, columns) == ["x=0, yes", "12.3", "True"]


def test_cells_leave_levels_blank_that_were_not_measured() -> None:
    assert cells(ROW, {"low": "{by_level[low]:.1f}", "high": "{by_level[high]:.1f}"}) == ["1.2", ""]


def test_cells_take_mappings_and_pairs() -> None:
    assert cells({"n": 3}, {"": "{n:d}"}) == cells((3, "x"), {"": "{0}"}) == ["3"]


def test_terminal_table_has_heads_and_a_row_each() -> None:
    table = terminal_table([ROW, ROW], {"way": "{name}"}, "title")
    assert [column.header for column in table.columns] == ["way"]
    assert (table.row_count, table.title) == (2, "title")
