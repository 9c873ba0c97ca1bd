"""Implements `trivium evaluate prediction`: the errors of the predictions of `trivium replay`."""

import asyncio
from typing import Annotated

import typer

from infra.cli.options import AsJson, Seed
from infra.terminal.output import print_json, stdout_console


def prediction(
    seconds: Annotated[float, typer.Option(min=5, help="Length of each live run.")] = 30.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of all runs.")] = 4,
    per_s: Annotated[float, typer.Option(min=0.1, help="Conversations/s that begin.")] = 2.0,
    seed: Seed = 1,
    as_json: AsJson = False,
) -> None:
    """Compare predictions with live runs, by metric and percentile.

    Starts a broker and a stack of simulated engines, holds conversations, and records them. From
    that recording it predicts what other policies would have done. Then it runs the same load with
    each of these, in several rounds. Writes build/bench/prediction.json. A round has six runs.

    Example: `trivium evaluate prediction --seconds 60 --rounds 2`
    """
    from rich.console import Console

    from infra.bench.results import show_bars
    from infra.research.live import prediction as study

    err = Console(stderr=True)
    results = asyncio.run(study.run(study.load_of(seconds, per_s, seed), rounds, err.print))
    path = study.write(results)
    if as_json:
        print_json(
            {"file": str(path), "ways": {row.variant: row.errors for row in results.comparisons}}
        )
        return
    console = stdout_console()
    console.print(study.table(results))
    show_bars(study.bars(results), console)
    console.print(f"Written to {path}.")
