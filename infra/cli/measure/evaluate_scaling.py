"""Implements `trivium evaluate scaling`: autoscaled pools over a day, against fixed fleets.

And `trivium evaluate interruptions`: how prompts interrupt answers in the same batch.
"""

import asyncio
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import AsJson, Seed, in_panel
from infra.terminal.output import print_json, stdout_console

if TYPE_CHECKING:
    from infra.research.studies.day_and_night import Day, DayComparison

_SIMULATED = in_panel("On virtual time")


def scaling(
    night: Annotated[
        float | None, typer.Option(min=0.1, help="Requests/s at midnight.", show_default="1, 0.5")
    ] = None,
    noon: Annotated[
        float | None, typer.Option(min=0.1, help="Requests/s at noon.", show_default="24, 6")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=1, help="Length of the day.", show_default="30, 4")
    ] = None,
    ttft: Annotated[
        int | None,
        typer.Option(min=1, help="Target of the first token, ms.", show_default="1000, 2000"),
    ] = None,
    tpot: Annotated[
        float | None, typer.Option(min=1, help="Target of a token, ms.", show_default="25, 100")
    ] = None,
    workers_max: Annotated[
        int | None, typer.Option(min=2, help="Most workers of any fleet.", show_default="12, 8")
    ] = None,
    seed: Seed = 1,
    out: Annotated[Path, typer.Option(help="Folder of the picture.")] = Path("build/evaluate"),
    as_json: AsJson = False,
    live: Annotated[
        bool, typer.Option("--live", help="On stacks of this machine, not on virtual time.")
    ] = False,
    start_s: Annotated[float, _SIMULATED(min=0, help="What a worker takes to start.")] = 20.0,
    jobs: Annotated[int, _SIMULATED(help="Processes.", show_default="one per core")] = 0,
) -> None:
    """Compare the worker-hours of pools that follow a day's load with the best fixed fleet.

    With the control law, patience and steps of `trivium up --autoscale`, on virtual time. The best
    fixed fleet is the smallest that serves as large a share of requests in time. With --live,
    processes with simulated engines serve a day of some minutes, one fleet after the other; where
    an option has two defaults, the second is for --live. Writes a picture, and
    build/bench/scaling.json or scaling_live.json.

    Examples: `trivium evaluate scaling --noon 16 --minutes 10`,
    `trivium evaluate scaling --live --minutes 6`
    """
    from infra.research.report import day as report
    from infra.research.studies.day_and_night import HOLDS

    flags = {
        "night_per_s": night,
        "noon_per_s": noon,
        "minutes": minutes,
        "ttft_ms": ttft,
        "tpot_ms": tpot,
        "workers_max": workers_max,
    }
    overrides = {name: value for name, value in flags.items() if value is not None}
    overrides["seed"] = seed
    if live:
        from infra.research.live.day import ENGINE, PATIENCE

        result = _live(overrides)
        load = {"engine": ENGINE, "patience": PATIENCE}
        page = report.write(result, out, "scaling_live", load)
    else:
        result = _simulated(overrides, start_s, jobs)
        page = report.write(result, out)
    if as_json:
        print_json(report.figures(result))
        return
    console = stdout_console()
    console.print(_table(result))
    if result.best is None:
        console.print(f"no fixed fleet of up to {result.day.workers_max} workers serves as well")
    else:
        console.print(f"{result.saved_share:.0%} fewer worker-hours than {result.best.pools}")
    if not result.following.holds:
        console.print(f"but pools that follow serve less than {HOLDS:.0%} in time")
    console.print(f"picture: {page}")


def _simulated(overrides: dict[str, Any], start_s: float, jobs: int) -> "DayComparison":
    from infra.planning.runs import runner
    from infra.research.studies.day_and_night import Day, compare_fleets

    day = _day_with(Day(start_ms=1_000 * start_s), overrides)
    with runner(jobs) as pool:
        return compare_fleets(pool, day)


def _live(overrides: dict[str, Any]) -> "DayComparison":
    from rich.console import Console

    from infra.research.live.day import DAY, compare_fleets

    return asyncio.run(compare_fleets(_day_with(DAY, overrides), Console(stderr=True).print))


def _day_with(day: "Day", overrides: dict[str, Any]) -> "Day":
    """Return the day with the overrides; no night is busier than noon."""
    custom_day = replace(day, **overrides)
    return replace(custom_day, night_per_s=min(custom_day.night_per_s, custom_day.noon_per_s))


def interruptions(
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 2_048,
    answer: Annotated[int, typer.Option(min=8, help="Tokens of an answer.")] = 200,
    as_json: AsJson = False,
) -> None:
    """Measure how often prompts interrupt an answer in a batch of 8: on a replica, and on a pair.

    On virtual time: eight clients send requests continuously, to a replica, and to a prefill and a
    decode worker. Gaps between tokens of more than 1.5 times an undisturbed gap are counted.

    Example: `trivium evaluate interruptions --prompt 8192`
    """
    from infra.research.report.pages import terminal_table
    from infra.research.studies.interruptions import POLICIES, measure_interruptions

    rows = [measure_interruptions(p, prompt_tokens=prompt, answer_tokens=answer) for p in POLICIES]
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    columns = {
        "workers": "{pools}",
        "interruptions": "{per_answer:.2f}",
        "ITL p50": "{itl_p50:.1f}",
        "ITL p99": "{itl_p99:.1f}",
        "ITL max": "{itl_max:.1f}",
        "TTFT p50": "{ttft_p50:.1f}",
    }
    title = f"per answer of {answer} tokens; times in ms"
    stdout_console().print(terminal_table(rows, columns, title))


def _table(result: "DayComparison") -> Any:
    from infra.research.report.pages import Columns, terminal_table

    columns: Columns = {
        "fleet": lambda fleet: fleet.pools or "follows",
        "worker-hours": "{worker_hours:.3g}",
        "in time": "{in_time:.2%}",
        "TTFT p99": "{ttft_p99_ms:.0f}",
        "TPOT p99": "{tpot_p99_ms:.1f}",
    }
    rows = (result.following, *sorted(result.fixed, key=lambda row: -row.in_time)[:8])
    return terminal_table(rows, columns, f"{result.following.requests} requests; times in ms")
