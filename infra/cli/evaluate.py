"""`trivium evaluate`: published evaluations, on the real router and simulated engines."""

import os
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from infra.cli.options import AsJson

TRACES = "TRIVIUM_TRACES"
_BESIDE = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "traces"

app = typer.Typer(help="Published evaluations, on the real router and simulated engines.")


@app.callback()
def _group() -> None:
    """Published evaluations, on the real router and simulated engines."""


@app.command("ppd")
def ppd(
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the grid.")] = False,
    seed: Annotated[
        int, typer.Option(help="Of arrivals; the same seed gives the same report.")
    ] = 1,
    jobs: Annotated[int, typer.Option(help="Processes.", show_default="one per core")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("build/evaluate"),
    traces: Annotated[
        Path | None,
        typer.Option(envvar=TRACES, help="Folder of real traffic.", show_default="if it is there"),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Open the report in a browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """The grid of the PPD paper, and what this project adds: about ten minutes, --quick one.

    Writes report.html, PNG files and results.json; a bar that does not hold is no error.
    """
    from infra.evaluate import report
    from infra.evaluate.main import evaluate

    if traces is None and _BESIDE.is_dir():
        traces = _BESIDE
    results = evaluate(quick=quick, seed=seed, jobs=jobs or os.cpu_count() or 1, traces=traces)
    page = report.write(results, out)
    if as_json:
        print(report.to_json(results, points=False))
        return
    console = Console()
    table = Table("", "what", "found", box=None, title=f"{results.runs} simulations")
    for bar in results.bars:
        table.add_row("[green]yes[/]" if bar.holds else "[red]no[/]", bar.what, bar.found)
    console.print(table)
    if results.traffic_skipped:
        console.print(f"real traffic: skipped; {results.traffic_skipped}", highlight=False)
    console.print(f"report: {page}", highlight=False)
    if show:
        webbrowser.open(page.resolve().as_uri())
