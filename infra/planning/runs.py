"""Runs many simulations on all cores, with a progress bar; results keep the order of the specs.

`Points` has them by configuration, workload and load.
"""

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from infra.planning import point
from infra.planning.grid import WORKLOADS, Config, Workload
from infra.planning.point import Point, Spec
from infra.processes.garbage import THRESHOLDS
from streams.core.placement.ppd_table import PpdTable

Task = TypeVar("Task")
Result = TypeVar("Result")
Key = tuple[Config, str, float]  # configuration, workload, load


class Points:
    """Points by configuration, workload and load."""

    def __init__(self, points: Iterable[Point]) -> None:
        self.by_key: dict[Key, Point] = {(p.config, p.workload, p.load_per_s): p for p in points}
        self.loads = sorted({load for _, _, load in self.by_key})
        self.workloads = [w for w in WORKLOADS if any(w.name == k[1] for k in self.by_key)]

    def __getitem__(self, key: Key) -> Point:
        return self.by_key[key]

    def subset(self, workloads: Sequence[Workload], loads: Sequence[float]) -> "Points":
        """Return the points of some workloads at some loads."""
        names = {workload.name for workload in workloads}
        return Points(p for p in self.by_key.values()
                      if p.workload in names and p.load_per_s in loads)  # fmt: skip

    def select(
        self, config: Config, loads: Iterable[float] | None = None, prefix: str = ""
    ) -> list[Point]:
        """Return a configuration's points at some loads (or all), for workloads with a name
        prefix."""
        grid_loads = self.loads if loads is None else [load for load in loads if load in self.loads]
        workloads = [w.name for w in self.workloads if w.name.startswith(prefix)]
        return [self[config, name, load] for name in workloads for load in grid_loads]


@dataclass(frozen=True, slots=True)
class Runner:
    """A pool of processes with a progress bar."""

    pool: ProcessPoolExecutor
    progress: Progress

    def map(
        self, label: str, function: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> list[Result]:
        """Call the function on every task, and return the results in order; both must be
        picklable."""
        bar = self.progress.add_task(label, total=len(tasks))
        futures = {self.pool.submit(function, task): i for i, task in enumerate(tasks)}
        results: dict[int, Result] = {}
        for future in as_completed(futures):
            results[futures[future]] = future.result()
            self.progress.advance(bar)
        return [results[i] for i in range(len(tasks))]

    def points(self, label: str, specs: Sequence[Spec]) -> list[Point]:
        """Return all points of all specs."""
        return [point for run in self.map(label, points_of, specs) for point in run]


@contextmanager
def runner(jobs: int) -> Iterator[Runner]:
    """Start a pool of `jobs` processes; 0 starts one per core."""
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed:>4.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        with ProcessPoolExecutor(jobs or os.cpu_count(), initializer=_spare_collector) as pool:
            yield Runner(pool, progress)


def _spare_collector() -> None:
    """Freeze imported objects and collect young ones seldom, which saves a tenth of the time."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def specs_of(
    configs: Iterable[Config],
    workloads: Sequence[Workload],
    loads: Sequence[float],
    seed: int,
    table: PpdTable | None = None,
) -> list[Spec]:
    """Return a spec for every configuration on every workload, at these loads."""
    return [
        Spec(config=config, workload=workload, loads_per_s=tuple(loads), seed=seed, table=table)
        for workload, config in product(workloads, configs)
    ]


def points_of(spec: Spec) -> list[Point]:
    """Run a spec's loads: each on a fresh cluster, but all on one if the router learns.

    The learning router gets the loads in an order that the seed shuffles: it has learned from other
    loads and from earlier requests.
    """
    if spec.config.policy != "learned":
        single_specs = [replace(spec, loads_per_s=(load,)) for load in spec.loads_per_s]
        return [result for single_spec in single_specs for result in point.run(single_spec)]
    order = np.random.default_rng(spec.seed).permutation(len(spec.loads_per_s))
    shuffled = tuple(spec.loads_per_s[i] for i in order)
    return sorted(
        point.run(replace(spec, loads_per_s=shuffled)), key=lambda result: result.load_per_s
    )
