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

from infra.bench.benchmark import Benchmark, BenchmarkResult
from infra.bench.plot import plot
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
    open_figures,
    other_cpu_share,
    panels,
    tables,
)
from infra.bench.serving.prompts import prompt_bars, prompt_figures, prompt_table

_TITLE = "Same simulated engine: 20 ms prefill, 5 ms per token, 64 tokens"


async def run(options: ServingOptions, console: Console) -> BenchmarkResult:
    """Start the peers, measure all cells, and report."""
    started_s = time.monotonic()
    console.print("Starting the peers ...")
    async with running_peers(options.peers, BENCH_DIR.absolute() / "serving") as peers:
        generator = await Generator.start()
        benchmark = ServingComparison(options, peers, generator)
        await benchmark.check_answers()
        console.print(f"{len(peers)} peers give the same {PROMPTS} answers.")
        await benchmark.warm_up()
        await benchmark.measure_idle(3)
        await benchmark.run_closed()
        await benchmark.run_open()
        prompts = await prompt_figures(peers, generator, options.prompt_words, options.seed)
        await generator.stop()
    closed, open_loop = closed_figures(benchmark.closed), open_figures(benchmark.open, keeps_up)
    figures: dict[str, Any] = {
        "closed_loop": closed,
        "open_loop": open_loop,
        "prompts": prompts,
        "idle_cpu_share": benchmark.idle,
        "other_cpu_share": other_cpu_share(closed) or 0.0,
        "elapsed_s": round(time.monotonic() - started_s),
    }
    plot(BENCH_DIR / "serving.png", panels(closed, open_loop), _TITLE)
    note = (
        f"Processes that were not under test took {figures['other_cpu_share']:.2f} cores of "
        f"{os.cpu_count()} meanwhile; above 0.3 only ratios mean anything."
    )
    return BenchmarkResult(
        figures=figures,
        bars=[*bars(benchmark.closed), *prompt_bars(prompts)],
        tables=[*tables(closed, open_loop), note, prompt_table(prompts)],
        load={"tokens": TOKENS, "prompt_words": PROMPT_WORDS, "sim": SIM},
        beside=f" and {BENCH_DIR / 'serving.png'}",
    )


BENCHMARK = Benchmark(
    "serving", __doc__, run, full=ServingOptions(), quick=QUICK,
    quick_help="one repeat, short cells",
)  # fmt: skip
