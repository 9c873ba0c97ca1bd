"""Curves of figures as a picture."""

from pathlib import Path

from infra.bench.plot import Panel, plot, points


def test_points_leave_out_missing_figures() -> None:
    rows = {"64": {"ms": 2.0, "asked": 5}, "8": {"ms": 1.0, "asked": 9}, "128": {"ms": None}}
    assert points(rows, "ms") == [(8.0, 1.0), (64.0, 2.0)]
    assert points({"a": rows["64"], "b": rows["8"]}, "ms", "asked") == [(5, 2.0), (9, 1.0)]


def test_plot_draws_panels_without_figures(tmp_path: Path) -> None:
    curves = {"ours p50": [(1, 2.0), (2, 3.0)], "ours p99": [(1, 4.0)], "none": []}
    panels = [Panel("x", "y", curves, log="xy"), Panel("x", "", {"misses": [(1, "name")]}),
              Panel("x", "y", {})]  # fmt: skip
    plot(tmp_path / "plots" / "picture.png", panels, "title")
    assert (tmp_path / "plots" / "picture.png").read_bytes().startswith(b"\x89PNG")
