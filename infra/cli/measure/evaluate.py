"""Implements `trivium evaluate`: published evaluations, with simulated or live engines."""

import asyncio
import json
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from infra.cli.measure import evaluate_prediction, evaluate_scaling
from infra.cli.options import AsJson, Seed, in_panel
from infra.terminal.output import stdout_console
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.planning.live_conversations import LiveLoad
    from infra.research.trinity.rag_cluster import TrinityCase
    from infra.research.trinity.study import Sweep

TRACES = "TRIVIUM_TRACES"
_BESIDE = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "traces"
_SIMULATED, _LIVE = in_panel("On virtual time"), in_panel("Live")
_EXAMPLES = """[bold]Examples[/]

trivium evaluate ppd [dim]the whole grid on virtual time, some twenty minutes[/]

trivium evaluate ppd --quick --show

trivium evaluate ppd --live --workload "large, big paste" --load 1 --load 4

trivium evaluate ppd --engine vllm --only pull --conversations 20 --turns 4
"""

_TRINITY_EXAMPLES = """[bold]Examples[/]

trivium evaluate trinity [dim]two to four minutes[/]

trivium evaluate trinity --quick --show

trivium evaluate trinity --gpu h200 --rows 50e6 --every 16 --json

trivium evaluate trinity --live [dim](a) and (c) on this machine's cores[/]
"""

app = typer.Typer(help="Repeat published evaluations.")
app.command("scaling")(evaluate_scaling.scaling)
app.command("interruptions")(evaluate_scaling.interruptions)
app.command("prediction")(evaluate_prediction.prediction)


@app.callback()
def _group() -> None:
    """Published evaluations, on the real router and simulated or live engines."""


@app.command("ppd", epilog=_EXAMPLES)
def ppd(
    engine: Annotated[
        str, typer.Option(help="Live engine: sim or vllm; vllm implies --live.", metavar="ENGINE")
    ] = "sim",
    live: Annotated[
        bool, typer.Option("--live", help="On stacks of this machine, not on virtual time.")
    ] = False,
    seed: Seed = 1,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("build/evaluate"),
    show: Annotated[bool, typer.Option("--show", help="Open the report in a browser.")] = False,
    as_json: AsJson = False,
    quick: Annotated[bool, _SIMULATED("--quick", help="A tenth of the grid.")] = False,
    jobs: Annotated[int, _SIMULATED(help="Processes.", show_default="one per core")] = 0,
    traces: Annotated[
        Path | None,
        _SIMULATED(envvar=TRACES, help="Folder of real traffic.", show_default="if it is there"),
    ] = None,
    chats: Annotated[
        list[Path] | None,
        _SIMULATED(
            help="File of ShareGPT or WildChat, for figures 4 and 5; may be repeated.",
            show_default="drawn with their means",
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        _LIVE(help="Of the grid; may be repeated.", show_default="large, mid paste"),
    ] = None,
    load: Annotated[
        list[float] | None,
        _LIVE(min=0.01, help="Conversations/s; may be repeated.", show_default="2"),
    ] = None,
    turns: Annotated[int, _LIVE(min=2, help="Per conversation.")] = 4,
    conversations: Annotated[int, _LIVE(min=1, help="Per way and load.")] = 20,
    streams: Annotated[int, _LIVE(min=1, help="Conversations at a time.")] = 2,
    scale: Annotated[float, _LIVE(min=0.001, help="Of the grid's lengths.")] = 1 / 16,
    only: Annotated[list[str] | None, _LIVE(help="Deployments of vllm: pull, push, kept.")] = None,
) -> None:
    """Run the grid of the PPD paper, and what this project adds; or a part of it on live engines.

    Writes an HTML report, PNG files and JSON, and build/bench/evaluate.json with its targets; a
    missed target is no error.
    """
    if engine not in ("sim", "vllm"):
        raise ConfigError(f"--engine: expected sim or vllm, found {engine!r}")
    if live or engine == "vllm":
        from infra.research.live.comparison import choose_loads

        loads = choose_loads(
            workload or ["large, mid paste"],
            load or [2.0],
            turns=turns,
            conversations=conversations,
            streams=streams,
            scale=scale,
            seed=seed,
        )
        page = _live(engine, loads, only or [], out, as_json)
    else:
        page = _simulated(quick, seed, jobs, traces, chats or [], out, as_json)
    if show:
        webbrowser.open(page.resolve().as_uri())


def _simulated(
    quick: bool,
    seed: int,
    jobs: int,
    traces: Path | None,
    files: list[Path],
    out: Path,
    as_json: bool,
) -> Path:
    from infra.research.evaluation import evaluate
    from infra.research.paper.conversations import SYNTHETIC, read
    from infra.research.report import bars, whole_page

    if traces is None and _BESIDE.is_dir():
        traces = _BESIDE
    results = evaluate(
        quick=quick,
        seed=seed,
        jobs=jobs,
        traces=traces,
        sources=[read(path, seed) for path in files] or SYNTHETIC,
    )
    page = whole_page.write(results, out)
    bars.write(results)
    if as_json:
        print(whole_page.to_json(results, points=False))
        return page
    console = stdout_console()
    table = Table("", "what", "found", box=None, title=f"{results.runs} simulations")
    for bar in results.bars:
        table.add_row("[green]yes[/]" if bar.holds else "[red]no[/]", bar.what, bar.finding)
    console.print(table)
    if results.traffic_skipped:
        console.print(f"real traffic: skipped; {results.traffic_skipped}")
    console.print(f"report: {page}")
    return page


def _live(engine: str, loads: "list[LiveLoad]", only: list[str], out: Path, as_json: bool) -> Path:
    from infra.research.live import comparison

    measured = asyncio.run(comparison.run(engine, loads, Console(stderr=True), only))
    page = comparison.write(engine, loads, measured, out)
    if as_json:
        print(json.dumps(measured, indent=1))
        return page
    console = stdout_console()
    for name, rows in measured.items():
        console.print(comparison.table(name, rows))
    console.print(f"report: {page}")
    return page


@app.command("trinity", epilog=_TRINITY_EXAMPLES)
def trinity(
    gpu: Annotated[str, typer.Option(help="h100, h200, a100 or l4.")] = "h100",
    gpus: Annotated[int, typer.Option(min=4, max=16, help="Of every placement.")] = 16,
    rows: Annotated[float, typer.Option(min=1, help="Vectors of the index.")] = 10e6,
    dim: Annotated[int, typer.Option(min=1, help="Values of a vector, float16.")] = 768,
    every: Annotated[int, typer.Option(min=0, help="Tokens between probes; 0: none.")] = 32,
    hop_ms: Annotated[float, typer.Option(min=0, help="One way over the log.")] = 3.0,
    seed: Seed = 1,
    jobs: Annotated[int, typer.Option(help="Processes.", show_default="one per core")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A third of the values.")] = False,
    measure: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Measure figure 1's points here anew; minutes."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("build/evaluate"),
    show: Annotated[bool, typer.Option("--show", help="Open the report in a browser.")] = False,
    as_json: AsJson = False,
    live: Annotated[
        bool, _LIVE("--live", help="(a) and (c) on stacks of this machine; two minutes.")
    ] = False,
    rate: Annotated[float, _LIVE(min=0.1, help="Chats/s.")] = 5.0,
    load_s: Annotated[float, _LIVE(min=1, help="Of each load, s.")] = 15.0,
) -> None:
    """Compare placements of vector search: beside each LLM worker, with prefill, or in its own
    pool.

    Trinity's three placements at equal GPU count, on virtual time with the real schedulers. Writes
    an HTML report, PNG files and JSON, and build/bench/trinity.json.
    """
    from infra.planning.runs import runner
    from infra.research.trinity import page, stage_measurements, study

    if live:
        _coupled(rate, load_s, seed, as_json)
        return
    case = _trinity_case(gpu, gpus, rows, dim, every, hop_ms, seed)
    if measure is not None:
        from infra.research.trinity.measure import measure as measure_here

        measure_here(measure, seed, Console(stderr=True).print)
    with runner(jobs) as pool:
        findings = study.run_study(pool, case, quick=quick)
    path = page.write(findings, stage_measurements.read(), out)
    if as_json:
        print(page.to_json(findings))
    else:
        console = stdout_console()
        console.print(_placements(findings.sweeps[0]))
        for sweep in findings.sweeps:
            for even in sweep.even:
                if even.at is not None:
                    console.print(f"{sweep.name}, by {even.metric}: {even.says}")
        console.print(f"report: {path}")
    if show:
        webbrowser.open(path.resolve().as_uri())


def _coupled(rate: float, load_s: float, seed: int, as_json: bool) -> None:
    from infra.bench import results
    from infra.research.live import coupled

    load = {"rate": rate, "load_s": load_s, "fillers": 5_000}
    coroutine = coupled.compare(
        Console(stderr=True), rate=rate, load_s=load_s, fillers=5_000, seed=seed
    )
    figures = asyncio.run(coroutine)
    path = results.write_report(
        "trinity_live",
        command=results.command_line(),
        seed=seed,
        load=load,
        figures=figures,
        bars=[],
        folder=results.BENCH_DIR,
    )
    if as_json:
        print(json.dumps(figures, indent=1))
    else:
        stdout_console().print(coupled.table(figures))
        print(f"written: {path}")


def _trinity_case(
    gpu: str, gpus: int, rows: float, dim: int, every: int, hop_ms: float, seed: int
) -> "TrinityCase":
    from infra.planning.hardware import IndexSpec, SearchCosts, gpu_named
    from infra.research.trinity import study
    from infra.simulator.machine.latency import Setup

    gpu_spec = gpu_named(gpu)
    return study.base(
        setup=Setup(gpu=gpu_spec),
        search=SearchCosts(gpu=gpu_spec, index=IndexSpec(rows=rows, dim=dim)),
        gpus=gpus,
        every=every,
        hop_ms=hop_ms,
        seed=seed,
    )


def _placements(sweep: "Sweep") -> Table:
    """Return a table of the placements at each load."""
    from infra.research.report.pages import terminal_table

    columns = {
        "requests/s": "{0:.0f}",
        "placement": "{1.placement}",
        "index GB": "{1.index_gb:.0f}",
        "TTFT p50": "{1.ttft_p50:.1f}",
        "p99": "{1.ttft_p99:.0f}",
        "TPOT p50": "{1.tpot_p50:.2f}",
        "tokens/s": "{1.tokens_per_s:.0f}",
    }
    rows = [(point.per_s, row) for point in sweep.points for row in point.results.values()]
    return terminal_table(rows, columns, "at equal GPU count, ms")
