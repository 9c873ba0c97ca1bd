"""The serving benchmark: Trivium beside a direct engine and two disaggregating HTTP proxies.

`make bench-serving`, or `trivium bench serving --quick`. One run starts all peers, checks
that they give the same answers, and measures them in turn, cell by cell: closed loops of so many
streams, then open loops of rising rate. Ratios are taken between cells that were measured next to
each other; bars judge the medians. Writes build/bench/serving.json and serving.png.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from infra.bench.arguments import chosen, run_and_print
from infra.bench.results import BENCH_DIR, command_line, show_bars, write_report
from infra.bench.serving.cells import (
    PROMPT_WORDS,
    PROMPTS,
    QUICK,
    TOKENS,
    Benchmark,
    Generator,
    Options,
    keeps_up,
)
from infra.bench.serving.contenders import NAMES, SIM, running_peers
from infra.bench.serving.figures import (
    bars,
    closed_figures,
    closed_table,
    cpu_table,
    open_figures,
    open_table,
    other_cpu_share,
)
from infra.bench.serving.plot import plot


async def run(options: Options, console: Console) -> dict[str, Any]:
    """The whole benchmark; returns the report."""
    started_s = time.monotonic()
    console.print("Starting the peers ...")
    async with running_peers(options.peers, BENCH_DIR.absolute() / "serving") as peers:
        generator = await Generator.start()
        benchmark = Benchmark(options, peers, generator)
        await benchmark.check_answers()
        console.print(f"{len(peers)} peers give the same {PROMPTS} answers.")
        columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            await benchmark.warm_up(progress)
            await benchmark.measure_idle(3)
            await benchmark.run_closed(progress)
            await benchmark.run_open(progress)
        await generator.stop()
    closed = closed_figures(benchmark.closed)
    figures: dict[str, Any] = {
        "closed_loop": closed,
        "open_loop": open_figures(benchmark.open, keeps_up),
        "idle_cpu_share": benchmark.idle,
        "other_cpu_share": other_cpu_share(closed) or 0.0,
        "elapsed_s": round(time.monotonic() - started_s),
    }
    judged = bars(benchmark.closed)
    path = write_report(
        "serving",
        command=command_line(),
        seed=options.seed,
        load={**asdict(options), "tokens": TOKENS, "prompt_words": PROMPT_WORDS, "sim": SIM},
        figures=figures,
        bars=judged,
        folder=BENCH_DIR,
    )
    plot(figures, BENCH_DIR / "serving.png")
    console.print(closed_table(figures["closed_loop"]))
    console.print(cpu_table(figures["closed_loop"]))
    console.print(
        f"Processes that were not under test took {figures['other_cpu_share']:.2f} cores of "
        f"{os.cpu_count()} meanwhile; above 0.3 only ratios mean anything."
    )
    console.print(open_table(figures["open_loop"]))
    show_bars(judged, console)
    console.print(f"Written to {path} and {path.with_suffix('.png')}.")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def parse(arguments: Sequence[str]) -> tuple[Options, bool]:
    """Options and whether to print the report as JSON."""
    parser = argparse.ArgumentParser(prog="bench serving", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one repeat, short cells")
    parser.add_argument("--json", action="store_true", help="print the report instead of tables")
    parser.add_argument("--seconds", type=float, help="of each cell's window")
    parser.add_argument("--repeats", type=int, help="of the closed loops")
    parser.add_argument("--open-repeats", type=int, help="of the open loops; 0 leaves them out")
    parser.add_argument("--warm-up", type=float, dest="warm_up_s", help="seconds of load before")
    parser.add_argument("--streams", type=int, nargs="+", help="closed loops to run")
    parser.add_argument("--rates", type=float, nargs="+", help="open loops to run, in req/s")
    parser.add_argument("--peers", nargs="+", choices=NAMES, help="which to compare")
    parser.add_argument("--seed", type=int)
    return chosen(parser, arguments, full=Options(), quick=QUICK)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of `trivium bench serving`."""
    run_and_print(arguments, parse, run)


if __name__ == "__main__":
    main()
