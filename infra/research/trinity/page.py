"""The report of `trivium evaluate trinity`: one page, plots, JSON."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from infra.bench import results as bench_results
from infra.research.report.html import listing, note, page, picture, table
from infra.research.report.plots import draw_png
from infra.research.trinity.placements import KINDS
from infra.research.trinity.roofline import Curve, fit_saturation
from infra.research.trinity.stage_measurements import StageMeasurement
from infra.research.trinity.study import METRICS, Sweep, SweepPoint, TrinityFindings

_PALETTE = ("#9aa5b1", "#8250df", "#bf8700", "#1a7f37", "#1f6feb")
_COLOURS = {kind.name: colour for kind, colour in zip(KINDS, _PALETTE, strict=True)}
_STAGES = {"prefill": "#1f6feb", "decode": "#1a7f37", "search": "#bf8700"}
_SHOWN: dict[str, Callable[[Any], Any]] = {
    "placement": lambda r: r.placement,
    "prefill + decode": lambda r: f"{r.prefill} + {r.decode}",
    "copies": lambda r: r.copies,
    "search GPUs": lambda r: r.search_gpus,
    "index GB": lambda r: f"{r.index_gb:.0f}",
    "updates/s": lambda r: f"{r.updates_per_s:.0f}",
    "TTFT p50/p99": lambda r: f"{r.ttft_p50:.1f} / {r.ttft_p99:.0f}",
    "TPOT p50/p99": lambda r: f"{r.tpot_p50:.2f} / {r.tpot_p99:.2f}",
    "tokens/s": lambda r: f"{r.tokens_per_s:.0f}",
    "in targets": lambda r: f"{r.good_share:.0%}",
    "probe p50/p99": lambda r: f"{r.probe_p50:.1f} / {r.probe_p99:.1f}",
    "stalled": lambda r: f"{r.stalled_share:.1%}",
    "search busy": lambda r: f"{r.search_busy:.0%}",
}


def write(findings: TrinityFindings, measured: Sequence[StageMeasurement], folder: Path) -> Path:
    """Write all files into the folder, and build/bench/trinity.json; return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trinity.json").write_text(to_json(findings))
    pictures = {
        "figure-1": draw_png(lambda figure: _figure_1(figure, findings.curves, measured)),
        **{
            f"placements-{sweep.name.replace(' ', '-')}": draw_png(
                lambda figure, sweep=sweep: _sweep(figure, sweep)
            )
            for sweep in findings.sweeps
        },
    }
    for name, data in pictures.items():
        (folder / f"{name}.png").write_bytes(data)
    path = folder / "trinity.html"
    path.write_text(page("Placements of the search pool", _parts(findings, measured, pictures)))
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


def _parts(
    findings: TrinityFindings, measured: Sequence[StageMeasurement], pictures: dict[str, bytes]
) -> list[str]:
    parts = [
        _about(findings),
        "<h2>Where (c) and another placement change places</h2>",
        _break_evens(findings),
    ]
    for sweep in findings.sweeps:
        name = f"placements-{sweep.name.replace(' ', '-')}"
        parts += [
            f"<h2>{escape(sweep.name)}, {escape(sweep.unit)}</h2>",
            picture(name, pictures[name]),
        ]
        parts += [part for point in sweep.points for part in _point(sweep, point)]
    parts += [
        "<h2>What collectives leave of being near</h2>",
        listing(
            findings.collectives,
            {
                "GPUs a worker": lambda row: row.degree,
                "a prompt, ms": lambda row: f"{row.prompt_ms:.1f}",
                "of it collectives": lambda row: f"{row.collective_ms:.1f}",
                "with a GPU on another node": lambda row: f"{row.crossing_ms:.1f}",
                "saved by a search in the node": lambda row: f"{row.saved_ms:.1f}",
            },
        ),
        "<h2>Figure 1: utilisation against batch size</h2>",
        picture("figure-1", pictures["figure-1"]),
        *_fits(findings.curves, measured),
    ]
    return parts


def _about(findings: TrinityFindings) -> str:
    base, traffic, index = findings.base, findings.base.traffic, findings.base.search.index
    probing = traffic.probing
    return (
        f"<p>{base.gpus} {escape(base.setup.gpu.name)}, {escape(base.setup.model.name)}; an index "
        f"of {index.rows / 1e6:g} million vectors of {index.dim} values "
        f"({index.total_bytes / 1e9:.1f} GB); chats of {traffic.prompt_tokens:g} tokens and "
        f"{traffic.found_tokens:g} that a search puts in, {traffic.answer_tokens:g} answered; a "
        f"probe every {probing.every} tokens, asked {probing.lookahead} ahead, that brings "
        f"{probing.new_tokens} tokens in {probing.new_share:.0%} of all cases; "
        f"{traffic.updates_per_s:g} documents/s change. The pool placement "
        f"serves at most {findings.per_s:.0f} requests/s. Seed {findings.seed}, "
        f"{findings.seconds:.0f} s. Router, workers' rules, gateways and the search scheduler "
        "are the real ones; GPUs, links and the log are models, whose figures are of "
        "data sheets or named as assumed (infra/docs/pools.md). Nothing was fitted to a "
        "comparison.</p><p>(a) couples copies of the index with LLM workers: one GPU for each, one "
        "for four, or in the workers' own memory. (b) has copies beside prefill workers and a pool "
        "for decode. (c) has one pool. All have the same GPUs. Times are ms; in targets: a first "
        f"token in {base.ttft_ms:g} ms and a token in {base.tpot_ms:g} ms.</p>"
    )


def _break_evens(findings: TrinityFindings) -> str:
    rows = []
    for sweep in findings.sweeps:
        rows += [
            (sweep.name, even.metric, even.rival, even.says)
            for even in sweep.even
            if even.at is not None
        ]
    return table(("varied", "by", "other", "found"), rows) + note(
        "Between two values that were run, by straight lines; figures within 1 % count as equal. "
        "Metrics and placements that are not listed do not change places in the range."
    )


def _point(sweep: Sweep, point: SweepPoint) -> list[str]:
    parts = [
        f"<h3>{escape(sweep.name)} {point.value:g}, {point.per_s:.0f} requests/s</h3>",
        listing(point.results.values(), _SHOWN),
    ]
    return parts + [note(why) for why in point.impossible.values()]


def _fits(curves: Sequence[Curve], measured: Sequence[StageMeasurement]) -> list[str]:
    rows = [
        (
            f"model: {curve.stage}",
            curve.what,
            *_numbers(curve.fit, "{:.2%} of the GPU's arithmetic"),
        )
        for curve in curves
    ]
    rows += [
        (
            f"measured: {stage.stage}",
            stage.what,
            *_numbers(fit_saturation(stage.points), f"{{:.4g}} {stage.unit}"),
        )
        for stage in measured
    ]
    return [
        table(("stage", "a batch is", "roof", "scale", "exponent", "slope"), rows),
        note(
            "U(B) = roof * min(1, slope * (B / scale) ** exponent). The scale of the model follows "
            "from its bytes and FLOP; that of measured points is the least batch with 0.9 of the "
            "most. Measured: " + "; ".join(f"{m.stage}: {m.about}" for m in measured)
        ),
    ]


def _numbers(fit: Any, roof: str) -> tuple[str, str, str, str]:
    return roof.format(fit.roof), f"{fit.scale:.0f}", f"{fit.exponent:.2f}", f"{fit.slope:.2f}"


def _sweep(figure: Any, sweep: Sweep) -> None:
    metrics = METRICS[0], METRICS[2], METRICS[3]
    for number, metric in enumerate(metrics, 1):
        axes = figure.add_subplot(1, len(metrics), number)
        for name, colour in _COLOURS.items():
            marks = [
                (point.value, getattr(point.results[name], metric.field))
                for point in sweep.points
                if name in point.results
            ]
            if marks:
                axes.plot(*zip(*marks, strict=True), marker="o", color=colour, label=name)
        axes.set_xlabel(sweep.unit.partition(",")[0])
        axes.set_ylabel(metric.name)
        if "TTFT" in metric.name:
            axes.set_yscale("log")
            axes.legend(fontsize=6)


def _figure_1(figure: Any, curves: Sequence[Curve], measured: Sequence[StageMeasurement]) -> None:
    model_axes = figure.add_subplot(1, 2, 1)
    for curve in curves:
        colour = _STAGES[curve.stage]
        batches = [batch for batch, _ in curve.points]
        model_axes.plot(
            batches, [value for _, value in curve.points], color=colour, label=curve.stage
        )
        model_axes.plot(batches, [curve.fit.at(b) for b in batches], color=colour, linestyle=":")
    model_axes.set_xscale("log", base=2)
    model_axes.set_yscale("log")
    model_axes.set_xlabel("batch size")
    model_axes.set_ylabel("share of the GPU's arithmetic")
    model_axes.legend(fontsize=7)
    measured_axes = figure.add_subplot(1, 2, 2)
    for stage in measured:
        fit, colour = fit_saturation(stage.points), _STAGES[stage.stage]
        batches = [batch for batch, _ in stage.points]
        measured_axes.plot(batches, [v / fit.roof for _, v in stage.points], "o", color=colour)
        measured_axes.plot(
            batches, [fit.at(b) / fit.roof for b in batches], color=colour, label=stage.stage
        )
    measured_axes.set_xscale("log", base=2)
    measured_axes.set_xlabel("batch size, on the cores of this machine")
    measured_axes.set_ylabel("share of the most that was measured")
    if measured:
        measured_axes.legend(fontsize=7)
