"""The search benchmark: the vector engine beside hnswlib, faiss, usearch and SVS, in one run.

`make bench-search`, or `trivium bench search --quick`. Parts: search speed at equal recall,
separated clusters, every data set of the zoo, build, mixed traffic of decode and prefill,
warm-started probes, updates, ingestion, the time that the log adds, and variants of the scheduler.
Writes build/bench/search.json and search.png. Does not use a GPU.
"""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from infra.bench.benchmark import Benchmark, BenchmarkResult
from infra.bench.cpu_time import CpuMeter
from infra.bench.results import BENCH_DIR, Bar
from infra.bench.search.options import PARTS, QUICK, Progress, SearchOptions
from infra.bench.search.parts import (
    every_kind,
    index_alone,
    ingest,
    mixed_traffic,
    scheduling,
    through_the_log,
    updates,
    warm_probes,
)
from infra.bench.search.plot import plot
from infra.bench.search.systems import OURS, installed, warm_up
from infra.bench.search.tables import tables

_ON_ONE_SCENE = {"speed", "build", "mixed", "warm"}


def measure(
    options: SearchOptions, names: Sequence[str], progress: Progress
) -> tuple[dict[str, Any], list[Bar]]:
    """Return the figures by part, in the order of `PARTS`, and the bars."""
    by_part: dict[str, tuple[Any, list[Bar]]] = {}
    parts = options.parts
    if set(parts) - {"scheduler"}:
        progress("kernels are compiled")
        warm_up(options.dim)
    if _ON_ONE_SCENE & set(parts):
        scene = index_alone.SearchScene.create(options, names, progress)
        if {"speed", "build"} & set(parts):
            curves = index_alone.curves(scene)
        if "speed" in parts:
            by_part["speed"] = index_alone.speed(scene, curves)
        if "build" in parts:
            by_part["build"] = index_alone.build_times(scene, curves)
        if "mixed" in parts:
            by_part["mixed"] = mixed_traffic.mixed(scene)
        if "warm" in parts:
            by_part["warm"] = warm_probes.warm(scene)
    if "clusters" in parts:
        by_part["clusters"] = index_alone.clusters(options, names, progress)
    if "every-kind" in parts:
        by_part["every-kind"] = every_kind.every_kind(options, names, progress)
    if "updates" in parts:
        by_part["updates"] = updates.updates(options, progress)
    if "ingest" in parts:
        by_part["ingest"] = ingest.ingest(options, progress)
    if "kafka" in parts:
        by_part["kafka"] = through_the_log.kafka(options, progress)
    if "scheduler" in parts:
        by_part["scheduler"] = scheduling.ablation(options, progress)
    ordered = {part: by_part[part] for part in PARTS if part in by_part}
    bars = [bar for _figures, part_bars in ordered.values() for bar in part_bars]
    return {part: figures for part, (figures, _bars) in ordered.items()}, bars


def run(options: SearchOptions, console: Console) -> BenchmarkResult:
    """Run all parts with the systems that are installed."""
    began_s, meter = time.monotonic(), CpuMeter({})
    here, sentences = installed()
    for sentence in sentences:
        console.print(sentence)
    names = [name for name in here if name == OURS or name in options.indexes]

    def progress(text: str) -> None:
        console.print(f"[{time.monotonic() - began_s:4.0f} s] {text}", markup=False)

    own_before_s = time.process_time()
    figures, bars = measure(options, names, progress)
    elapsed_s = time.monotonic() - began_s
    others_s = meter.machine_s() - (time.process_time() - own_before_s)
    figures |= {"left_out": sentences, "elapsed_s": round(elapsed_s)}
    figures["other_cpu_share"] = round(max(0.0, others_s) / elapsed_s, 2)
    plot(figures, BENCH_DIR / "search.png")
    note = (
        f"Other processes took {figures['other_cpu_share']:.2f} cores meanwhile; above 0.3 only "
        "ratios mean anything, and times under load not even those."
    )
    return BenchmarkResult(
        figures=figures,
        bars=bars,
        tables=[*tables(figures), note],
        load={"indexes": names},
        beside=f" and {BENCH_DIR / 'search.png'}",
    )


BENCHMARK = Benchmark(
    name="search",
    about=__doc__,
    run=run,
    full=SearchOptions(),
    quick=QUICK,
    quick_help="a quarter of the rows, less of all",
)
