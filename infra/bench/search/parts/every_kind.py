"""Part of the search benchmark: speed at equal recall over every data set of the zoo.

One thread, CPU time, k = 10, exact truth with ties counted as right. Systems take turns effort by
effort. A call for all queries takes 2 ms at the lowest effort, most of it on cache misses after the
other systems' turns, so a turn repeats the call for at least a fiftieth of a second. A rate at a
recall is interpolated between two efforts; if all efforts have more recall, it is the highest rate.
A system that never reaches a recall has no rate there.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infra.bench.results import Bar, at_least, at_most
from infra.bench.search.scene import K, Progress, SearchScene
from infra.bench.search.systems import OURS, OperatingPoint, System, at_recall, build
from infra.bench.search.zoo import truth
from infra.bench.search.zoo.kinds import KINDS, DataKind
from infra.bench.search.zoo.random_kinds import random_kind
from workers.vector.kernels.arrays import Array
from workers.vector.limits import TOP_M_MAX

RECALLS = (0.93, 0.98)
_EFFORTS = (10, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1_024, 2_048)
_USUAL = 64
_ENOUGH = 0.985  # recall above which higher efforts are not measured
_TURNS = 5
_TURN_S = 0.02  # at least, of CPU time
_RIVALS = ("hnswlib", "faiss")  # in the bars
_DRAWN = "drawn {}"


@dataclass(frozen=True, slots=True, eq=False)
class DataSet:
    """The vectors, queries and true distances of one data set."""

    kind: DataKind
    vectors: Array
    queries: Array
    limits: Array

    @classmethod
    def from_kind(cls, kind: DataKind, rows: int, queries: int) -> "DataSet":
        """Draw a data set of this kind and compute its true neighbours."""
        vectors, query_rows = kind.draw(rows, queries)
        return cls(kind, vectors, query_rows, truth.farthest(vectors, query_rows, K, kind.metric))

    def point(self, system: System, effort: int) -> OperatingPoint:
        """Search all queries repeatedly for one turn and time it."""
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        calls, took_cpu_s = 0, 0.0
        while took_cpu_s < _TURN_S:
            rows = system.search(self.queries, K, effort, 1)
            calls, took_cpu_s = calls + 1, time.process_time() - began_cpu_s
        took_s = time.perf_counter() - began_s
        return OperatingPoint(
            effort=effort,
            recall=truth.recall(self.vectors, self.queries, rows, self.limits, self.kind.metric),
            queries_per_s=calls * len(self.queries) / took_s,
            queries_per_cpu_s=calls * len(self.queries) / took_cpu_s,
        )


def every_kind(scene: SearchScene) -> tuple[Any, list[Bar]]:
    """Return figures by data set, and the bars: the worst ratio, and the geometric mean."""
    options, progress = scene.options, scene.progress
    kinds = {name: KINDS[name] for name in options.kinds}
    kinds |= {_DRAWN.format(seed): random_kind(seed) for seed in options.random_seeds}
    figures = {}
    for name, kind in kinds.items():
        rows = max(2_000, int(kind.rows * options.zoo_share))
        progress(f"{name}: {rows} vectors, true neighbours")
        data_set = DataSet.from_kind(kind, rows, options.zoo_queries)
        figures[name] = _compare(data_set, scene.names, options.seed, progress)
    return figures, _bars(figures)


def _compare(
    data_set: DataSet, names: Sequence[str], seed: int, progress: Progress
) -> dict[str, Any]:
    systems = []
    for name in names:
        progress(f"    {name} builds")
        systems.append(build(name, data_set.vectors, 1, seed, data_set.kind.metric))
    curves = _curves(data_set, systems)
    figures: dict[str, Any] = {
        "rows": len(data_set.vectors), "dim": data_set.vectors.shape[1],
        "metric": data_set.kind.metric.value, "systems": {},
    }  # fmt: skip
    for system in systems:
        points = curves[system.name]
        usual = next((p.recall for p in points if p.effort == _USUAL), None)
        figures["systems"][system.name] = {
            "build_cpu_s": system.build_cpu_s,
            "recall_at_64": data_set.point(system, _USUAL).recall if usual is None else usual,
            "recall_most": max(point.recall for point in points),
            "queries_per_cpu_s": {str(recall): rate(points, recall) for recall in RECALLS},
            "curve": [[p.effort, round(p.recall, 4), round(p.queries_per_cpu_s)] for p in points],
        }
    return figures


def _curves(data_set: DataSet, systems: Sequence[System]) -> dict[str, list[OperatingPoint]]:
    """Return each system's median point of each effort, until its recall is `_ENOUGH`."""
    curves: dict[str, list[OperatingPoint]] = {system.name: [] for system in systems}
    going = list(systems)
    for system in systems:
        data_set.point(system, _EFFORTS[0])
    for effort in _EFFORTS:
        going = [system for system in going if system.name != OURS or effort <= TOP_M_MAX]
        turns = [[data_set.point(system, effort) for system in going] for _ in range(_TURNS)]
        for system, same in zip(going, zip(*turns, strict=True), strict=True):
            middle = sorted(same, key=lambda point: point.queries_per_cpu_s)[_TURNS // 2]
            curves[system.name].append(middle)
        going = [system for system in going if curves[system.name][-1].recall < _ENOUGH]
    return curves


def rate(points: Sequence[OperatingPoint], recall: float) -> float | None:
    """Return queries per CPU second at a recall, or None."""
    if min(point.recall for point in points) >= recall:
        return max(point.queries_per_cpu_s for point in points)
    return at_recall(points, recall, of_cpu=True)


def rows(figures: dict[str, Any]) -> dict[str, Any]:
    """Return rows for a table, worst first."""
    out: dict[str, Any] = {}
    for name, row in figures.items():
        systems = row["systems"]
        for recall in RECALLS:
            rates = {n: s["queries_per_cpu_s"][str(recall)] for n, s in systems.items()}
            out[f"{name}, {recall}"] = {
                "trivium_times": times(row, recall), **rates,
                "recall_at_64": systems[OURS]["recall_at_64"], "build_times": build_times(row),
            }  # fmt: skip
    worst = sorted(out.items(), key=lambda item: (item[1]["trivium_times"] is None,
                                                  item[1]["trivium_times"] or 0))  # fmt: skip
    return dict(worst)


def times(figures: dict[str, Any], recall: float) -> float | None:
    """Return our rate over the best rival's: 0 if we never reach the recall, infinite if no rival
    does, None if no system does."""
    rates = {
        name: row["queries_per_cpu_s"][str(recall)] for name, row in figures["systems"].items()
    }
    rival_rates = [rates[name] for name in _RIVALS if rates.get(name)]
    if not rival_rates:
        return math.inf if rates[OURS] else None
    return float((rates[OURS] or 0.0) / max(rival_rates))


def build_times(figures: dict[str, Any]) -> float | None:
    """Return our CPU seconds to build over hnswlib's."""
    systems = figures["systems"]
    if _RIVALS[0] not in systems:
        return None
    return float(systems[OURS]["build_cpu_s"] / systems[_RIVALS[0]]["build_cpu_s"])


def _bars(figures: dict[str, Any]) -> list[Bar]:
    every = [times(row, recall) for row in figures.values() for recall in RECALLS]
    compared = [ratio for ratio in every if ratio is not None]
    builds = [
        build_ratio for row in figures.values() if (build_ratio := build_times(row)) is not None
    ]
    floor = min(row["systems"][OURS]["recall_at_64"] for row in figures.values())
    bars = [at_least("every kind: least recall at top_m 64", floor, 0.95)]
    if not compared or not builds:
        return bars
    both = [ratio for ratio in compared if 0 < ratio < math.inf]
    mean = math.exp(sum(map(math.log, both)) / len(both)) if both else None
    return [
        *bars,
        at_least("every kind: least speed, of the best rival's", min(compared), 1.0, "times"),
        at_least("every kind: the same, geometric mean where both get there", mean, 1.5, "times"),
        at_most("every kind: most CPU time to build, of hnswlib's", max(builds), 1.0, "times"),
    ]
