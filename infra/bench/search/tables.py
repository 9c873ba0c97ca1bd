"""Makes the tables of the search benchmark, one for each part."""

from typing import Any

from rich.table import Table

from infra.bench.results import number
from infra.bench.search.parts import every_kind
from infra.bench.search.parts.updates import DEAD_SHARE
from infra.bench.search.systems import OURS
from workers.vector.index.index import LINK_BATCH


def tables(figures: dict[str, Any]) -> list[Table]:
    """Return one table for each part that was measured."""
    makers = {
        "speed": _speed, "clusters": _clusters, "every-kind": _every_kind, "build": _build,
        "mixed": _mixed, "warm": _warm, "updates": _updates, "ingest": _ingest,
        "kafka": _kafka, "scheduler": _scheduler,
    }  # fmt: skip
    return [makers[part](part_figures) for part, part_figures in figures.items() if part in makers]


def _speed(figures: dict[str, Any]) -> Table:
    table = Table(
        "recall@10", "index", "queries/s", "by CPU time", "ours is faster", "by CPU time",
        title="Search speed, one thread, medians of the repeats",
    )  # fmt: skip
    for recall, rows in figures["at_recall"].items():
        for name, row in rows.items():
            rates = (row["queries_per_s"], row["queries_per_cpu_s"])
            times = (row["trivium_times"], row["trivium_times_by_cpu"])
            table.add_row(recall, name, *map(number, (*rates, *times)))
        table.add_section()
    table.caption = f"Two threads: {number(figures['two_threads_times'])} times one."
    return table


def _clusters(figures: dict[str, Any]) -> Table:
    table = Table("index", "recall@10", "queries/s", title="Separated clusters, effort 64")
    for name, row in figures.items():
        table.add_row(name, f"{row['recall']:.4f}", number(row["queries_per_s"]))
    return table


def _every_kind(figures: dict[str, Any]) -> Table:
    first = next(iter(figures.values()))
    table = Table(
        "data", "recall@10", "ours is faster", *(f"{name}/s" for name in first["systems"]),
        "at 64", "build of hnswlib's",
        title="Every kind of data: queries per CPU second at equal recall, worst first",
    )  # fmt: skip
    rows = [(every_kind.times(row, recall), recall, name) for name, row in figures.items()
            for recall in every_kind.RECALLS]  # fmt: skip
    for faster, recall, name in sorted(rows, key=lambda row: (row[0] is None, row[0] or 0, row[2])):
        systems = figures[name]["systems"]
        rates = (row["queries_per_cpu_s"][str(recall)] for row in systems.values())
        table.add_row(
            name, str(recall), "nobody" if faster is None else f"{faster:.2f}",
            *("never" if rate is None else f"{rate:.0f}" for rate in rates),
            f"{systems[OURS]['recall_at_64']:.3f}", number(every_kind.build_times(figures[name])),
        )  # fmt: skip
    return table


def _build(figures: dict[str, Any]) -> Table:
    table = Table("index", "s", "CPU s", "builds", title="Build on two threads")
    for name, row in figures.items():
        table.add_row(
            name, f"{row['build_s']:.1f}", f"{row['build_cpu_s']:.1f}", str(len(row["builds_s"]))
        )
    return table


def _updates(figures: dict[str, Any]) -> Table:
    table = Table("what", "", title="Rows that come and go")
    for row in figures["links"]:
        linked = f"{number(row['batch_cpu_s'])} CPU s, {number(row['rows_per_cpu_s'])} rows/CPU s"
        table.add_row(f"{LINK_BATCH} rows are linked to {row['rows']}", linked)
    table.add_section()
    for name, stalls in figures["stalls_ms"].items():
        cell = f"{number(stalls['held_ms'])} ms; late {number(stalls['late_ms'])} ms"
        table.add_row(f"the event loop was held up: {name}", cell)
    table.caption = (
        f"Of {figures['rows']} rows, {DEAD_SHARE:.0%} of them deleted. A loop is late, and not "
        "held up, where others had the core."
    )
    return table


def _ingest(figures: dict[str, Any]) -> Table:
    table = Table(
        "rows", "rows/s", "CPU us a row", "rows/s by CPU", "searches/s, alone", "share",
        "held up ms p99.9/most, alone",
        title=f"Rows that come, {figures['per_s']} a second if they can, while searches go on",
    )  # fmt: skip
    for step in figures["steps"]:
        beside, alone = step["beside"], step["alone"]
        rates = (step["rows_per_s"], step["row_cpu_us"], step["rows_per_s_by_cpu"])
        stalls = (f"{side['held_ms_p99.9']}/{side['held_ms']}" for side in (beside, alone))
        table.add_row(
            str(step["rows"]), *map(number, rates),
            f"{beside['searches_per_s']}, {alone['searches_per_s']}",
            f"{step['search_share']:.2f}", ", ".join(stalls),
        )  # fmt: skip
    table.caption = (
        f"Recall@{figures['k']} at {figures['top_m']} entries at the end: {figures['recall']:.3f}. "
        f"The feed was held back for {figures['held_back_s']} s."
    )
    return table


def _mixed(figures: dict[str, Any]) -> Table:
    table = Table(
        "server", "asked/s", "served/s", "decode ms p50/p99", "prefill ms p50/p99", "late",
        "places in use",
        title="Mixed traffic: 80 % decode, 20 % prefill",
    )  # fmt: skip
    for name, server in figures["servers"].items():
        rows = {"unloaded": server["unloaded"], **server["loads"]}
        for share, row in rows.items():
            times = (
                "/".join(number(row[f"{kind}_ms_p{p}"]) for p in (50, 99))
                for kind in ("decode", "prefill")
            )
            load = f"{row['asked_per_s']:.0f} ({share})"
            occupancy, late = row["occupancy"], str(row["prefill_misses"])
            rate = number(row["searches_per_s"])
            table.add_row(name, load, rate, *times, late, number(occupancy))
        table.add_section()
    capacities = ", ".join(
        f"{n} {number(f['capacity_per_s'])}" for n, f in figures["servers"].items()
    )
    table.caption = f"Capacity with callers that always ask, searches/s: {capacities}."
    return table


def _warm(figures: dict[str, Any]) -> Table:
    table = Table("probe", "recall@10", "distances", title="Warm probes of drifting sequences")
    rows = zip(figures["recall_by_probe"], figures["distances_by_probe"], strict=True)
    for probe, (recall, distances) in enumerate(rows, 1):
        table.add_row(str(probe), f"{recall:.3f}", f"{distances:.0f}")
    cold = figures["cold_distances_at_equal_recall"]
    table.caption = (
        f"Probes 2 on: recall {figures['warm_recall']:.3f} at {figures['warm_distances']:.0f} "
        f"distances; cold at equal recall: {number(cold)}."
    )
    return table


def _kafka(figures: dict[str, Any]) -> Table:
    table = Table(
        "retrievals/s", "way", "ms p50", "ms p99", "recall@10", "errors", "CPU ms of a retrieval",
        title="One retrieval worker, one asker",
    )  # fmt: skip
    for rate, row in figures["at_rate"].items():
        for way, cell in row["ways"].items():
            cpu = ", ".join(f"{name} {number(used)}" for name, used in cell["cpu_ms"].items())
            times = (number(cell["ms_p50"]), number(cell["ms_p99"]))
            table.add_row(rate, way, *times, f"{cell['recall']:.3f}", str(cell["errors"]), cpu)
        added = (number(row["added_ms_p50"]), number(row["added_ms_p99"]))
        table.add_row(rate, "added, median of the repeats", *added, "", "", "")
        table.add_section()
    return table


def _scheduler(figures: dict[str, Any]) -> Table:
    table = Table(
        "load step", "variant", "misses", "prefill", "decode", "prefill p99 ms", "decode p99 ms",
        title="Scheduler, simulated: misses of both classes",
    )  # fmt: skip
    for scene, step_figures in figures["at"].items():
        for name in step_figures["shown"]:
            row = step_figures["variants"][name]
            counts = (str(row[key]) for key in ("misses", "prefill_misses", "decode_misses"))
            times = (number(row[f"{kind}_ms_p99"]) for kind in ("prefill", "decode"))
            table.add_row(scene, name, *counts, *times)
        table.add_section()
    return table
