"""Runs many seeds on all cores and sums up their verdicts; minimizes a failing scenario."""

import gc
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice, product

from infra.simulator.faults.aiming import PHASES, StrikeCounts
from infra.simulator.faults.kinds import KINDS
from infra.simulator.scenarios.run import SeedVerdict, run
from infra.simulator.scenarios.scenario import Scenario, draw_scenario

_CHUNK = 16  # seeds that a process gets at a time
_WINDOW = 8  # chunks per process in one window; the caller may stop between windows


@dataclass(slots=True)
class Summary:
    """The sums of many seeds' verdicts."""

    seeds: int = 0
    requests: int = 0
    simulated_ms: float = 0.0
    reached: StrikeCounts = field(default_factory=StrikeCounts)
    violations: list[SeedVerdict] = field(default_factory=list)

    def add(self, verdict: SeedVerdict) -> None:
        """Add one seed's verdict to the sums."""
        self.seeds += 1
        self.requests += verdict.requests
        self.simulated_ms += verdict.simulated_ms
        self.reached.update(verdict.reached)
        if verdict.violation:
            self.violations.append(verdict)

    @property
    def unreached(self) -> list[tuple[str, str]]:
        """Return the pairs of a fault and a phase that never met."""
        return [pair for pair in product(KINDS, PHASES) if not self.reached[pair]]


def run_seed(seed: int) -> SeedVerdict:
    """Run the scenario of one seed, unchanged."""
    return run(draw_scenario(seed))


def verdicts(seeds: Iterable[int], jobs: int) -> Iterator[SeedVerdict]:
    """Yield the verdict of each seed in order; seeds may have no end."""
    seed_iterator = iter(seeds)
    if jobs == 1:
        yield from map(run_seed, seed_iterator)
        return
    # Modules stay loaded: freezing them spares the garbage collector from scanning them each time.
    with ProcessPoolExecutor(jobs, initializer=gc.freeze) as pool:
        while window := list(islice(seed_iterator, _CHUNK * _WINDOW * jobs)):
            yield from pool.map(run_seed, window, chunksize=_CHUNK)


def minimize_scenario(scenario: Scenario, verdict: SeedVerdict) -> Scenario:
    """Remove faults and clients while the scenario fails; none of the rest can be removed alone."""
    while (less := _shrink_once(scenario, verdict)) is not None:
        scenario = less
    return scenario


def _shrink_once(scenario: Scenario, verdict: SeedVerdict) -> Scenario | None:
    """Return the scenario without one fault or client if it still fails; None if all are needed."""
    faults = {fault.number for fault in scenario.plan}
    clients = {client.name for client in scenario.clients}
    candidates = [scenario.only(faults - {fault}, clients) for fault in sorted(faults)]
    candidates += [scenario.only(faults, clients - {client}) for client in sorted(clients)]
    return next((less for less in candidates if run(less).where == verdict.where), None)
