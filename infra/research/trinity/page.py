"""The report of `trivium evaluate trinity`: one page (`trinity.jinja`), plots, JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infra.bench import results as bench_results
from infra.research.report.pages import draw_png, mark, panels, render
from infra.research.trinity.placements import KINDS
from infra.research.trinity.roofline import Curve, fit_saturation
from infra.research.trinity.stage_measurements import StageMeasurement
from infra.research.trinity.study import METRICS, Sweep, TrinityFindings

_PALETTE = ("#9aa5b1", "#8250df", "#bf8700", "#1a7f37", "#1f6feb")
_COLOURS = {kind.name: colour for kind, colour in zip(KINDS, _PALETTE, strict=True)}
_STAGES = {"prefill": "#1f6feb", "decode": "#1a7f37", "search": "#bf8700"}


def write(findings: TrinityFindings, measured: Sequence[StageMeasurement], folder: Path) -> Path:
    """Write all files into the folder, and build/bench/trinity.json; return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trinity.json").write_text(to_json(findings))
    pictures = {"figure-1": draw_png(_figure_1, findings.curves, measured)}
    pictures |= {_picture_of(sweep): draw_png(_sweep, sweep) for sweep in findings.sweeps}
    for name, data in pictures.items():
        (folder / f"{name}.png").write_bytes(data)
    path = folder / "trinity.html"
    path.write_text(
        render(
            "trinity.jinja",
            pictures,
            findings=findings,
            measured=measured,
            evens=[
                (s.name, even) for s in findings.sweeps for even in s.even if even.at is not None
            ],
            fits=_fits(findings.curves, measured),
            picture_of=_picture_of,
        )
    )
    bench_results.write_report(
        "trinity",
        command=bench_results.command_line(),
        seed=findings.seed,
        load={"quick": findings.quick, "seconds": findings.seconds},
        figures={**asdict(findings), "figure_1_measured": [asdict(stage) for stage in measured]},
        bars=[],
        folder=bench_results.BENCH_DIR,
    )
    return path


def to_json(findings: TrinityFindings) -> str:
    """Return all findings as JSON."""
    return json.dumps(asdict(findings), indent=1)


def _picture_of(sweep: Sweep) -> str:
    return f"placements-{sweep.name.replace(' ', '-')}"


def _fits(curves: Sequence[Curve], measured: Sequence[StageMeasurement]) -> list[tuple[Any, ...]]:
    """Return for each stage of the model and of this machine: name, batch, roof in words, fit."""
    fits: list[tuple[Any, ...]] = [
        (f"model: {c.stage}", c.what, f"{c.fit.roof:.2%} of the GPU's arithmetic", c.fit)
        for c in curves
    ]
    for stage in measured:
        fit = fit_saturation(stage.points)
        name = f"measured: {stage.stage}"
        fits.append((name, stage.what, f"{fit.roof:.4g} {stage.unit}", fit))
    return fits


def _sweep(figure: Any, sweep: Sweep) -> None:
    metrics = {metric.name: metric for metric in (METRICS[0], METRICS[2], METRICS[3])}
    for metric, axes in panels(figure, list(metrics)):
        for name, colour in _COLOURS.items():
            marks = [
                (point.value, getattr(point.results[name], metrics[metric].field))
                for point in sweep.points
                if name in point.results
            ]
            if marks:
                axes.plot(*zip(*marks, strict=True), marker="o", color=colour, label=name)
        log = "y" if "TTFT" in metric else ""
        mark(axes, sweep.unit.partition(",")[0], metric, log, legend=bool(log))


def _figure_1(figure: Any, curves: Sequence[Curve], measured: Sequence[StageMeasurement]) -> None:
    (_, model), (_, here) = panels(figure, ["model", "measured"], columns=2)
    for curve in curves:
        colour, batches = _STAGES[curve.stage], [batch for batch, _ in curve.points]
        model.plot(*zip(*curve.points, strict=True), color=colour, label=curve.stage)
        model.plot(batches, [curve.fit.at(b) for b in batches], color=colour, linestyle=":")
    mark(model, "batch size", "share of the GPU's arithmetic", "xy", legend=True)
    for stage in measured:
        fit, colour = fit_saturation(stage.points), _STAGES[stage.stage]
        batches = [batch for batch, _ in stage.points]
        here.plot(batches, [v / fit.roof for _, v in stage.points], "o", color=colour)
        fitted = [fit.at(b) / fit.roof for b in batches]
        here.plot(batches, fitted, color=colour, label=stage.stage)
    x, y = "batch size, on the cores of this machine", "share of the most that was measured"
    mark(here, x, y, "x", legend=True)
