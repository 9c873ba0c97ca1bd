"""The serving benchmark: Trivium beside a direct engine and two disaggregating HTTP proxies.

`make bench-serving`, or `trivium bench serving --quick`. One run starts all peers, checks that they
give the same answers, and measures them in turn, cell by cell: closed loops with a fixed number of
streams, then open loops with rising rates. Ratios compare cells that were measured next to each
other; bars are on their medians. Then it measures the CPU and bytes that prompts of several lengths
cost. Writes build/bench/serving.json and serving.png.
"""

import os
import time
from typing import Any

from rich.console import Console

from infra.bench.benchmark import Benchmark, BenchmarkResult, counting
from infra.bench.results import BENCH_DIR
from infra.bench.serving.cells import (
    PROMPT_WORDS,
    PROMPTS,
    QUICK,
    TOKENS,
    Generator,
    ServingComparison,
    ServingOptions,
    keeps_up,
)
from infra.bench.serving.contenders import SIM, running_peers
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
from infra.bench.serving.prompts import prompt_bars, prompt_figures, prompt_table


async def run(options: ServingOptions, console: Console) -> BenchmarkResult:
    """Start the peers, measure all cells, and report."""
    started_s = time.monotonic()
    console.print("Starting the peers ...")
    async with running_peers(options.peers, BENCH_DIR.absolute() / "serving") as peers:
        generator = await Generator.start()
        benchmark = ServingComparison(options, peers, generator)
        await benchmark.check_answers()
        console.print(f"{len(peers)} peers give the same {PROMPTS} answers.")
        with counting(console, 34) as progress:
            await benchmark.warm_up(progress)
            await benchmark.measure_idle(3)
            await benchmark.run_closed(progress)
            await benchmark.run_open(progress)
        prompts = await prompt_figures(peers, generator, options.prompt_words, options.seed)
        await generator.stop()
    closed = closed_figures(benchmark.closed)
    figures: dict[str, Any] = {
        "closed_loop": closed,
        "open_loop": open_figures(benchmark.open, keeps_up),
        "prompts": prompts,
        "idle_cpu_share": benchmark.idle,
        "other_cpu_share": other_cpu_share(closed) or 0.0,
        "elapsed_s": round(time.monotonic() - started_s),
    }
    plot(figures, BENCH_DIR / "serving.png")
    note = (
        f"Processes that were not under test took {figures['other_cpu_share']:.2f} cores of "
        f"{os.cpu_count()} meanwhile; above 0.3 only ratios mean anything."
    )
    return BenchmarkResult(
        figures=figures,
        bars=[*bars(benchmark.closed), *prompt_bars(prompts)],
        tables=[
            closed_table(closed),
            cpu_table(closed),
            note,
            open_table(figures["open_loop"]),
            prompt_table(prompts),
        ],
        load={"tokens": TOKENS, "prompt_words": PROMPT_WORDS, "sim": SIM},
        beside=f" and {BENCH_DIR / 'serving.png'}",
    )


BENCHMARK = Benchmark(
    name="serving",
    about=__doc__,
    run=run,
    full=ServingOptions(),
    quick=QUICK,
    quick_help="one repeat, short cells",
)
