"""What a request costs, as the benchmark tells it."""

from infra.bench.costs import main as costs

FIGURES = {
    "idle": {"broker": {"cores": 0.1, "wakeups_per_s": 300.0}},
    "cells": {
        "1 stream": {
            "cpu_ms": {"broker": 3.0, "router": 2.0},
            "topics": {"usage": {"records": 1.0, "bytes": 255.0, "marks": 0.1}},
        }
    },
    "held_kib": {"gateway": 12.0},
}


def table_rows(committed: object) -> dict[str, list[list[str]]]:
    return {
        str(table.title): [list(row) for row in zip(*(c.cells for c in table.columns), strict=True)]
        for table in costs.tables(FIGURES, committed)  # type: ignore[arg-type]
    }


def test_cost_tables_show_committed_figures() -> None:
    before = {**FIGURES, "idle": {"broker": {"cores": 0.2, "wakeups_per_s": 600.0}}}
    alone = table_rows(None)
    assert alone["CPU, ms per request"] == [["broker", "3"], ["router", "2"], ["all", "5"]]
    assert alone["Bytes per request"] == [["usage", "255"]]
    both = table_rows({"figures": before, "commit": "8ac655a1234"})
    assert both["Idle (before: 8ac655a)"][0] == ["broker", "0.1 (0.2)", "300 (600)"]
    assert both["KiB per held stream (before: 8ac655a)"] == [["gateway", "12 (12)"]]
