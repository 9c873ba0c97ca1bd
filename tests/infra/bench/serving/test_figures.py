"""Figures, tables and bars of the serving benchmark follow from its cells."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from infra.bench.plot import plot
from infra.bench.serving.cells import keeps_up
from infra.bench.serving.figures import (
    Cells,
    bars,
    closed_figures,
    open_figures,
    other_cpu_share,
    panels,
    tables,
)
from tests.infra.bench.serving.made_up_cells import cell

CLOSED: Cells = {
    "direct": {64: [cell(190, 20), cell(180, 22)], 256: [cell(600, 40)] * 2,
               512: [cell(900, 60)] * 2},
    "httpx": {64: [cell(80, 400), cell(90, 300)], 256: [cell(40, 3_000)] * 2},
    "aiohttp": {64: [cell(188, 27)] * 2, 256: [cell(460, 170, 3)] * 2, 512: [cell(600, 400)] * 2},
    "replica": {64: [cell(185, 28), cell(186, 31)], 256: [cell(650, 60, 2)] * 2,
                512: [cell(1_100, 100)] * 2},
    "remote": {64: [cell(170, 55)] * 2, 256: [cell(400, 90)] * 2},
}  # fmt: skip


def test_bars_compare_cells() -> None:
    bars_by_name = {bar.name: bar for bar in bars(CLOSED)}
    assert len(bars_by_name) == 10
    assert bars_by_name["replica, 64 streams: req/s over aiohttp"].value == pytest.approx(
        185.5 / 188
    )
    assert bars_by_name["replica, 64 streams: TTFT p50 over direct"].value == 8.5
    assert bars_by_name["replica, 256 streams: req/s over httpx"].value == 650 / 40
    assert bars_by_name["replica, 256 streams: server CPU per request of aiohttp's"].value == 2 / 3
    missed = [bar.name for bar in bars(CLOSED) if not bar.met]
    assert missed == [
        "remote, 64 streams: TTFT p50 over direct", "remote, 256 streams: req/s over aiohttp",
    ]  # fmt: skip


def test_bars_fail_without_measurements() -> None:
    assert all(bar.value is None and not bar.met for bar in bars({}))


def test_figures_fill_tables_and_plot(tmp_path: Path) -> None:
    open_cells: Cells = {"direct": {100.0: [cell(99, 20)], 400.0: [cell(200, 20)]}}
    figures = {
        "closed_loop": closed_figures(CLOSED),
        "open_loop": open_figures(open_cells, keeps_up),
    }
    assert figures["closed_loop"]["direct"]["64"]["requests_per_s"] == 185
    assert figures["open_loop"]["direct"]["kept_up_to_per_s"] == 100
    assert json.loads(json.dumps(figures)) == figures
    assert other_cpu_share(figures["closed_loop"]) == 0.2
    console = Console(record=True, width=120, file=(tmp_path / "out").open("w"))
    for table in tables(figures["closed_loop"], figures["open_loop"]):
        console.print(table)
    console.file.close()
    text = console.export_text()
    assert "256, aiohttp" in text and "Kept up with, in req/s: direct 100" in text
    plot(tmp_path / "serving.png", panels(figures["closed_loop"], figures["open_loop"]))
    assert (tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG")
