"""What every benchmark writes, and the statistics that it is made of."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from infra.bench.results import (
    Bar,
    at_least,
    at_most,
    cell,
    commit,
    machine,
    median,
    median_difference,
    median_ratio,
    nested,
    percentile,
    ratio,
    show_bars,
    table,
    write_report,
)

FINITE = st.floats(-1e9, 1e9)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 50, None),
        ([3.0], 99, 3.0),
        ([1.0, 2.0], 50, 1.5),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([0.0, 10.0], 99, 9.9),
        ([5.0, 1.0, 9.0], 0, 1.0),
        ([5.0, 1.0, 9.0], 100, 9.0),
    ],
)
def test_percentile_interpolates_values(
    values: list[float], percent: float, expected: float | None
) -> None:
    assert percentile(values, percent) == (None if expected is None else pytest.approx(expected))


@given(st.lists(FINITE, min_size=1), st.floats(0, 100))
def test_percentile_lies_within_range(values: list[float], percent: float) -> None:
    result = percentile(values, percent)
    assert result is not None and min(values) <= result <= max(values)


def test_median_ratio_pairs_measurements() -> None:
    assert median_ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == 3.0
    assert median_ratio([2.0, None, 8.0], [0.0, 10.0, 2.0]) == 4.0
    assert median_ratio([], []) is None
    assert median_difference([3.0, None, 9.0], [1.0, 1.0, 2.0]) == 4.5
    assert median([None, None]) is None


def test_bars_compare_values_with_targets() -> None:
    assert at_least("a", 2.0, 2, "x").met and not at_least("a", 1.99, 2, "x").met
    assert at_most("a", 2.0, 2, "x").met and not at_most("a", 2.01, 2, "x").met
    assert not at_least("a", None, 2, "x").met and not at_most("a", None, 2, "x").met
    assert at_least("a", 1.0, 0.97, "x").target == ">= 0.97"


def test_report_contains_fields_of_all_benchmarks(tmp_path: Path) -> None:
    bar = at_most("first token", 12.5, 10, "ms")
    path = write_report(
        "example",
        command="bench example",
        seed=7,
        load={"streams": 4},
        figures={"rate": 3},
        bars=[bar],
        folder=tmp_path / "bench",
    )
    assert path == tmp_path / "bench" / "example.json"
    report = json.loads(path.read_text())
    assert {name: report[name] for name in ("name", "command", "seed", "load", "figures")} == {
        "name": "example",
        "command": "bench example",
        "seed": 7,
        "load": {"streams": 4},
        "figures": {"rate": 3},
    }
    assert report["bars"] == [
        {"name": "first token", "value": 12.5, "unit": "ms", "target": "<= 10", "met": False}
    ]
    assert report["commit"] == commit() and report["machine"]["cores"] >= 1


def test_machine_describes_cpu_memory_and_python() -> None:
    description = machine()
    assert (
        description["cpu"]
        and description["memory_gib"] > 0
        and description["python"].startswith("3.")
    )


def render_bars(bars: list[Bar]) -> str:
    console = Console(record=True, width=200, file=Path("/dev/null").open("w"))
    show_bars(bars, console)
    console.file.close()
    return console.export_text()


def test_show_bars_names_missed_bars() -> None:
    text = render_bars([at_least("rate", 1.0, 2, "x"), at_most("time", None, 2, "ms")])
    assert "2 of 2 bars missed: rate; time." in text and "not measured" in text
    assert "All 1 bars met." in render_bars([at_least("rate", 3.0, 2, "x")])


def cells_of(*arguments: object, **options: str) -> list[tuple[object, ...]]:
    columns = table("title", *arguments, **options).columns  # type: ignore[arg-type]
    return [tuple(column.header for column in columns),
            *zip(*(column.cells for column in columns), strict=True)]  # fmt: skip


def test_table_shows_nested_figures_by_path() -> None:
    rows = {"a": {"ms": {"p50": 1.0, "p99.9": 2.5}, "count": 3}, "b": {"count": None}}
    paths = ("count", "ms.p99.9", "ms.p75")
    assert cells_of(rows, *paths) == [
        ("", "count", "ms p99 9", "ms p75"), ("a", "3", "2.5", "-"), ("b", "-", "-", "-")
    ]  # fmt: skip
    assert cells_of(rows)[1] == ("a", "p50 1, p99.9 2.5", "3")
    assert cells_of({"stalls": 7}) == [("", "value"), ("stalls", "7")]
    assert cells_of({}) == [("",)]


def test_cells_format_figures() -> None:
    figures = [None, 0.12345, 1234.5, 7, True, [1, "x"], {"gateway": 0.5}, "text"]
    texts = ["-", "0.123", "1234", "7", "yes", "1, x", "gateway 0.5", "text"]
    assert [cell(figure) for figure in figures] == texts
    assert nested({"0.93": {"ours": 1, "theirs": 2}}) == {"0.93, ours": 1, "0.93, theirs": 2}
    assert (ratio(3, 2), ratio(None, 2), ratio(3, 0)) == (1.5, None, None)
