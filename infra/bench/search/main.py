"""The search benchmark: the vector engine beside hnswlib, faiss and usearch, in one run.

`make bench-search`, or `trivium bench search --quick`. Parts: search speed at equal recall,
separated clusters, build, mixed traffic of decode and prefill, warm-started probes, what the log
adds, and the scheduler taken apart. Writes build/bench/search.json and search.png. On a GPU it
measures nothing.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from infra.bench.cpu_time import CpuMeter
from infra.bench.results import BENCH_DIR, Bar, command_line, show_bars, write_report
from infra.bench.search.options import QUICK, Options, Progress
from infra.bench.search.parts import (
    index_alone,
    mixed_traffic,
    scheduling,
    through_the_log,
    warm_probes,
)
from infra.bench.search.plot import plot
from infra.bench.search.systems import installed, warm_up
from infra.bench.search.tables import tables

PARTS = ("speed", "clusters", "build", "mixed", "warm", "kafka", "scheduler")
_FILE_COLUMNS = 120  # where the output is not a terminal
_ON_ONE_SCENE = {"speed", "build", "mixed", "warm"}


def run(
    options: Options, parts: Sequence[str], names: Sequence[str], progress: Progress
) -> tuple[dict[str, Any], list[Bar]]:
    """Figures by part, in the order of `PARTS`, and the bars."""
    found: dict[str, tuple[Any, list[Bar]]] = {}
    if set(parts) - {"scheduler"}:
        progress("kernels are compiled")
        warm_up(options.dim)
    if _ON_ONE_SCENE & set(parts):
        scene = index_alone.Scene.made(options, names, progress)
        if {"speed", "build"} & set(parts):
            curves = index_alone.curves(scene)
        if "speed" in parts:
            found["speed"] = index_alone.speed(scene, curves)
        if "build" in parts:
            found["build"] = index_alone.build_times(scene, curves)
        if "mixed" in parts:
            found["mixed"] = mixed_traffic.mixed(scene)
        if "warm" in parts:
            found["warm"] = warm_probes.warm(scene)
    if "clusters" in parts:
        found["clusters"] = index_alone.clusters(options, names, progress)
    if "kafka" in parts:
        found["kafka"] = through_the_log.kafka(options, progress)
    if "scheduler" in parts:
        found["scheduler"] = scheduling.ablation(options, progress)
    ordered = {part: found[part] for part in PARTS if part in found}
    bars = [bar for _figures, each in ordered.values() for bar in each]
    return {part: figures for part, (figures, _bars) in ordered.items()}, bars


def report(
    options: Options, parts: Sequence[str], names: Sequence[str], console: Console
) -> dict[str, Any]:
    """Run, write and show; the report."""
    began_s, meter = time.monotonic(), CpuMeter({})
    here, sentences = installed()
    for sentence in sentences:
        console.print(sentence)
    names = [name for name in here if name in names]

    def progress(text: str) -> None:
        console.print(f"[{time.monotonic() - began_s:4.0f} s] {text}", markup=False)

    own_before_s = time.process_time()
    figures, bars = run(options, parts, names, progress)
    elapsed_s = time.monotonic() - began_s
    others_s = meter.machine_s() - (time.process_time() - own_before_s)
    figures |= {"left_out": sentences, "elapsed_s": round(elapsed_s)}
    figures["other_cpu_share"] = round(max(0.0, others_s) / elapsed_s, 2)
    path = write_report(
        "search",
        command=command_line(),
        seed=options.seed,
        load={**asdict(options), "parts": list(parts), "indexes": list(names)},
        figures=figures,
        bars=bars,
        folder=BENCH_DIR,
    )
    plot(figures, BENCH_DIR / "search.png")
    for table in tables(figures):
        console.print(table)
    console.print(
        f"Other processes took {figures['other_cpu_share']:.2f} cores meanwhile; above 0.3 only "
        "ratios mean anything, and times under load not even those."
    )
    show_bars(bars, console)
    console.print(f"Written to {path} and {path.with_suffix('.png')}.")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of `trivium bench search`."""
    here, _ = installed()
    parser = argparse.ArgumentParser(prog="bench search", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the rows, less of all")
    parser.add_argument("--json", action="store_true", help="print the report instead of tables")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART",
                        help=f"some of {', '.join(PARTS)}")  # fmt: skip
    parser.add_argument("--indexes", nargs="+", default=here, help="which to compare with ours")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--builds", type=int, help="of ours and of hnswlib")
    parser.add_argument("--seed", type=int)
    given = vars(parser.parse_args(sys.argv[1:] if arguments is None else arguments))
    base = QUICK if given.pop("quick") else Options()
    as_json, only, names = given.pop("json"), given.pop("only"), given.pop("indexes")
    options = replace(base, **{name: value for name, value in given.items() if value is not None})
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = _FILE_COLUMNS
    found = report(options, only, [here[0], *names], console)
    if as_json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
