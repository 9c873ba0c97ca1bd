"""`trivium evaluate scaling`: pools that follow a day and a night, against fixed fleets.

And `trivium evaluate interruptions`: what prompts do to the answers beside them.
"""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import AsJson, Seed
from infra.terminal.output import print_json, stdout_console

if TYPE_CHECKING:
    from infra.evaluate.studies.day_and_night import Compared


def scaling(
    night: Annotated[float, typer.Option(min=0.1, help="Requests/s at midnight.")] = 1.0,
    noon: Annotated[float, typer.Option(min=0.1, help="Requests/s at noon.")] = 24.0,
    minutes: Annotated[float, typer.Option(min=1, help="Length of the day.")] = 30.0,
    start_s: Annotated[float, typer.Option(min=0, help="What a worker takes to start.")] = 20.0,
    ttft: Annotated[int, typer.Option(min=1, help="Target of the first token, ms.")] = 1_000,
    tpot: Annotated[float, typer.Option(min=1, help="Target of a token, ms.")] = 25.0,
    workers_max: Annotated[int, typer.Option(min=2, help="Most workers of any fleet.")] = 12,
    seed: Seed = 1,
    jobs: Annotated[int, typer.Option(help="Processes.", show_default="one per core")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the picture.")] = Path("build/evaluate"),
    as_json: AsJson = False,
) -> None:
    """Worker-hours of pools that follow a load of day and night, against the best fixed fleet.

    On virtual time, with the law, the patience and the steps of `trivium up --autoscale`. The best
    fixed fleet is the smallest that serves as large a share of requests in time. Writes a picture,
    and build/bench/scaling.json. Example: `trivium evaluate scaling --noon 16 --minutes 10`
    """
    from infra.evaluate.points.runs import runner
    from infra.evaluate.report import day as report
    from infra.evaluate.studies.day_and_night import Day, compared

    day = replace(
        Day(),
        night_per_s=min(night, noon),
        noon_per_s=noon,
        minutes=minutes,
        start_ms=1_000 * start_s,
        ttft_ms=ttft,
        tpot_ms=tpot,
        workers_max=workers_max,
        seed=seed,
    )
    with runner(jobs or os.cpu_count() or 1) as pool:
        found = compared(pool, day)
    page = report.write(found, out)
    if as_json:
        print_json(report.figures(found))
        return
    console = stdout_console()
    console.print(_table(found))
    if found.best is None:
        console.print(f"no fixed fleet of up to {workers_max} workers serves as well")
    else:
        console.print(f"{found.saved:.0%} fewer worker-hours than {found.best.pools}")
    console.print(f"picture: {page}")


def interruptions(
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 2_048,
    answer: Annotated[int, typer.Option(min=8, help="Tokens of an answer.")] = 200,
    as_json: AsJson = False,
) -> None:
    """How often prompts interrupt an answer in a batch of 8: on a replica, and on a pair.

    On virtual time: eight clients ask again and again, of a replica, and of a prefill and a decode
    worker. Gaps between tokens of more than 1.5 times a quiet one are counted.

    Example: `trivium evaluate interruptions --prompt 8192`
    """
    from rich.table import Table

    from infra.evaluate.studies.interruptions import POLICIES, interrupted

    rows = [interrupted(p, prompt_tokens=prompt, answer_tokens=answer) for p in POLICIES]
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    heads = ("workers", "interruptions", "ITL p50", "ITL p99", "ITL max", "TTFT p50")
    table = Table(*heads, box=None, title=f"per answer of {answer} tokens; times in ms")
    for row in rows:
        times = (row.itl_p50, row.itl_p99, row.itl_max, row.ttft_p50)
        table.add_row(row.pools, f"{row.per_answer:.2f}", *(f"{each:.1f}" for each in times))
    stdout_console().print(table)


def _table(found: "Compared") -> Any:
    from rich.table import Table

    heads = ("fleet", "worker-hours", "in time", "TTFT p99", "TPOT p99")
    table = Table(*heads, box=None, title=f"{found.following.requests} requests; times in ms")
    for fleet in (found.following, *sorted(found.fixed, key=lambda each: -each.in_time)[:8]):
        table.add_row(
            fleet.pools or "follows",
            f"{fleet.worker_hours:.2f}",
            f"{fleet.in_time:.2%}",
            f"{fleet.ttft_p99_ms:.0f}",
            f"{fleet.tpot_p99_ms:.1f}",
        )
    return table
