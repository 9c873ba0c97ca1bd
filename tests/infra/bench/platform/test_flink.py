"""Rows of Flink are counted from the raw topics."""

from typing import Any

from infra.bench.platform.flink import (
    Overload,
    RowCounts,
    answer_row,
    bars,
    own_row,
    steady_rate,
)


def test_row_counts_report_missing_and_double_rows() -> None:
    row_counts = RowCounts()
    for row in ("1", "2", "2"):
        row_counts.rows[row] += 1
    assert (row_counts.double, row_counts.missing(["1", "2", "3"])) == (1, 1)


def test_row_parser_reports_missing_text() -> None:
    record: Any = None
    assert own_row(record, {"id": 1, "answer": "Jar"}) == ("1", "")
    assert own_row(record, {"id": 1, "answer": None}) == ("1", "empty")
    answer = {"prompt_topic": "p", "prompt_partition": 0, "prompt_offset": 7, "error_code": "shed"}
    assert answer_row(record, answer) == (("p", 0, 7), "shed")


def test_overload_offers_five_times_capacity() -> None:
    options = Overload(seconds=300)
    assert options.rate / options.capacity > 4.8
    assert options.tickets == options.rate * 300


def test_steady_rate_excludes_start_and_end() -> None:
    """A pool that starts 10 s after the first row has no lower rate for that."""
    answers = [10_000 + 500 * n for n in range(40)]
    assert steady_rate(answers, 20_000) == 2.0
    assert steady_rate([0, 10_000], 20_000) == 0.05
    assert steady_rate(answers, 10_000) == steady_rate([], 10_000) == 0.0


def test_bars_fail_after_restart_or_lost_row() -> None:
    good = {"job_restarts": 0, "rows_lost": 0, "rows_double": 0, "offered_to_capacity": 5.0}
    assert all(bar.met for bar in bars(good))
    for name in ("job_restarts", "rows_lost", "rows_double"):
        assert not all(bar.met for bar in bars(good | {name: 1}))
