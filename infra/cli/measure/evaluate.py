"""`trivium evaluate`: published evaluations, on the real router and simulated or live engines."""

import asyncio
import json
import os
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from infra.cli.options import AsJson, Seed, in_panel
from infra.terminal.output import stdout_console
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.evaluate.live.conversations import LiveLoad

TRACES = "TRIVIUM_TRACES"
_BESIDE = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "traces"
_SIMULATED, _LIVE = in_panel("On virtual time"), in_panel("Live")
_EXAMPLES = """[bold]Examples[/]

trivium evaluate ppd [dim]the whole grid on virtual time, about ten minutes[/]

trivium evaluate ppd --quick --show

trivium evaluate ppd --live --workload "large, big paste" --load 1 --load 4

trivium evaluate ppd --engine vllm --only pull --conversations 20 --turns 4
"""

app = typer.Typer(help="Published evaluations, on simulated or live engines.")


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
    """The grid of the PPD paper, and what this project adds; or a part of it on live engines.

    Writes an HTML report, PNG files and JSON, and build/bench/evaluate.json with its bars; one that
    does not hold is no error.
    """
    if engine not in ("sim", "vllm"):
        raise ConfigError(f"--engine: expected sim or vllm, found {engine!r}")
    if live or engine == "vllm":
        from infra.evaluate.live.comparison import chosen

        loads = chosen(
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
        page = _simulated(quick, seed, jobs, traces, out, as_json)
    if show:
        webbrowser.open(page.resolve().as_uri())


def _simulated(
    quick: bool, seed: int, jobs: int, traces: Path | None, out: Path, as_json: bool
) -> Path:
    from infra.evaluate.evaluation import evaluate
    from infra.evaluate.report import bars, whole_page

    if traces is None and _BESIDE.is_dir():
        traces = _BESIDE
    results = evaluate(quick=quick, seed=seed, jobs=jobs or os.cpu_count() or 1, traces=traces)
    page = whole_page.write(results, out)
    bars.write(results)
    if as_json:
        print(whole_page.to_json(results, points=False))
        return page
    console = stdout_console()
    table = Table("", "what", "found", box=None, title=f"{results.runs} simulations")
    for bar in results.bars:
        table.add_row("[green]yes[/]" if bar.holds else "[red]no[/]", bar.what, bar.found)
    console.print(table)
    if results.traffic_skipped:
        console.print(f"real traffic: skipped; {results.traffic_skipped}")
    console.print(f"report: {page}")
    return page


def _live(engine: str, loads: "list[LiveLoad]", only: list[str], out: Path, as_json: bool) -> Path:
    from infra.evaluate.live import comparison

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
