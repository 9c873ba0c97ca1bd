"""The search benchmark: the vector engine beside hnswlib, faiss, usearch and SVS, in one run.

`make bench-search`, or `trivium bench search --quick`. Parts: search speed at equal recall,
separated clusters, every data set of the zoo, build, mixed traffic of decode and prefill,
warm-started probes, updates, ingestion, the time that the log adds, and variants of the scheduler.
Writes build/bench/search.json and search.png. Does not use a GPU.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from infra.bench.benchmark import Benchmark, BenchmarkResult
from infra.bench.meters import CpuMeter
from infra.bench.plot import Panel, plot, points
from infra.bench.results import BENCH_DIR, Bar, nested, table
from infra.bench.search.parts import (
    every_kind,
    index_alone,
    ingest,
    mixed_traffic,
    scheduling,
    through_the_log,
    updates,
)
from infra.bench.search.scene import PARTS, QUICK, SearchOptions, SearchScene
from infra.bench.search.systems import OURS, installed, warm_up

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SearchPart:
    """One part: how it is measured, and the table of its figures."""

    measure: Callable[[SearchScene], tuple[Figures, list[Bar]]]
    title: str
    columns: tuple[str, ...] = ()
    rows: Callable[[Figures], Mapping[str, Any]] = dict


def _loads(figures: Figures) -> Figures:
    """Return a row for each server and load."""
    servers = figures["servers"].items()
    return nested({name: {"unloaded": row["unloaded"], **row["loads"]} for name, row in servers})


def _probes(figures: Figures) -> Figures:
    """Return a row for each probe, and one for cold searches of equal recall."""
    pairs = zip(figures["recall_by_probe"], figures["distances_by_probe"], strict=True)
    rows = {str(n): {"recall": pair[0], "distances": pair[1]} for n, pair in enumerate(pairs, 1)}
    distances = figures["cold_distances_at_equal_recall"]
    return rows | {"cold": {"recall": figures["warm_recall"], "distances": distances}}


def _variants(figures: Figures) -> Figures:
    """Return a row for each variant of the scheduler that is worth showing."""
    steps = figures["at"].items()
    return nested({n: {name: row["variants"][name] for name in row["shown"]} for n, row in steps})


def _retrievals(figures: Figures) -> Figures:
    """Return a row for each way and rate, and what the log adds."""
    rows = figures["at_rate"].items()
    added = {rate: {f"ms_p{p}": row[f"added_ms_p{p}"] for p in (50, 99)} for rate, row in rows}
    return nested({rate: {**row["ways"], "added": added[rate]} for rate, row in rows})


MEASURED = {
    "speed": SearchPart(index_alone.speed, "Search speed by recall, one thread",
                        rows=lambda figures: nested(figures["at_recall"])),
    "build": SearchPart(index_alone.build_times, "Build on two threads"),
    "mixed": SearchPart(
        mixed_traffic.mixed, "Mixed traffic: 80 % decode, 20 % prefill",
        ("asked_per_s", "searches_per_s", "decode_ms_p50", "decode_ms_p99", "prefill_ms_p50",
         "prefill_ms_p99", "prefill_misses", "occupancy"), _loads),
    "warm": SearchPart(index_alone.warm, "Warm probes of drifting sequences", rows=_probes),
    "clusters": SearchPart(index_alone.clusters, "Separated clusters, effort 64",
                           ("recall", "queries_per_s")),
    "every-kind": SearchPart(
        every_kind.every_kind, "Every kind of data: queries per CPU second at equal recall",
        rows=every_kind.rows),
    "updates": SearchPart(
        updates.updates, "Stalls of the event loop, ms, while rows come and go",
        rows=lambda figures: figures["stalls_ms"]),
    "ingest": SearchPart(
        ingest.ingest, "Rows that come while searches go on",
        ("rows_per_s", "row_cpu_us", "rows_per_s_by_cpu", "beside.searches_per_s",
         "alone.searches_per_s", "search_share", "beside.held_ms", "alone.held_ms"),
        lambda figures: {str(step["rows"]): step for step in figures["steps"]}),
    "kafka": SearchPart(through_the_log.kafka, "Retrievals: one worker, one asker",
                        ("ms_p50", "ms_p99", "recall", "errors", "cpu_ms"), _retrievals),
    "scheduler": SearchPart(
        scheduling.ablation, "Scheduler, simulated: misses of both classes",
        ("misses", "prefill_misses", "decode_misses", "prefill_ms_p99", "decode_ms_p99"),
        _variants),
}  # fmt: skip


def panels(figures: Figures) -> Iterator[Panel]:
    """Yield the panels of the plot: recall against rate, times under load, misses."""
    curves = figures.get("speed", {}).get("curves", {})
    pairs = {n: [(p["recall"], p["queries_per_s"]) for p in some] for n, some in curves.items()}
    yield Panel("recall@10", "queries per s, one thread", pairs, log="y")
    servers = figures.get("mixed", {}).get("servers", {})
    for key, label in (("decode_ms_p99", "decode p99, ms"), ("occupancy", "places in use")):
        loads = {n: points(row["loads"], key, "asked_per_s") for n, row in servers.items()}
        yield Panel("searches per s asked, 4 of 5 decode's", label, loads)
    for step, row in [*figures.get("scheduler", {}).get("at", {}).items()][:1]:
        variants = [(name, row["variants"][name]) for name in row["shown"]]
        kinds = ("prefill_misses", "decode_misses")
        misses = {kind: [(v[kind], name) for name, v in variants] for kind in kinds}
        yield Panel(f"misses, simulated; {step}", "", misses)


def run(options: SearchOptions, console: Console) -> BenchmarkResult:
    """Run all parts with the systems that are installed."""
    began_s, meter = time.monotonic(), CpuMeter({})
    here, sentences = installed()
    for sentence in sentences:
        console.print(sentence)
    names = [name for name in here if name == OURS or name in options.indexes]

    def progress(text: str) -> None:
        console.print(f"[{time.monotonic() - began_s:4.0f} s] {text}", markup=False)

    own_before_s, scene = time.process_time(), SearchScene(options, names, progress)
    if set(options.parts) - {"scheduler"}:
        progress("kernels are compiled")
        warm_up(options.dim)
    parts = {name: part for name, part in MEASURED.items() if name in options.parts}
    measured = {name: part.measure(scene) for name, part in parts.items()}
    figures: Figures = {name: measured[name][0] for name in PARTS if name in measured}
    tables = [
        table(part.title, part.rows(figures[name]), *part.columns) for name, part in parts.items()
    ]
    elapsed_s = time.monotonic() - began_s
    others_s = meter.machine_s() - (time.process_time() - own_before_s)
    share = round(max(0.0, others_s) / elapsed_s, 2)
    figures |= {"left_out": sentences, "elapsed_s": round(elapsed_s), "other_cpu_share": share}
    plot(BENCH_DIR / "search.png", list(panels(figures)))
    note = (
        f"Other processes took {share:.2f} cores meanwhile; above 0.3 only "
        "ratios mean anything, and times under load not even those."
    )
    return BenchmarkResult(
        figures=figures,
        bars=[bar for name in PARTS if name in measured for bar in measured[name][1]],
        tables=[*tables, note],
        load={"indexes": names},
        beside=f" and {BENCH_DIR / 'search.png'}",
    )


BENCHMARK = Benchmark(
    "search", __doc__, run, full=SearchOptions(), quick=QUICK,
    quick_help="a quarter of the rows, less of all",
)  # fmt: skip
