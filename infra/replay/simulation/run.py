"""Serves recorded traffic, or a trace, again on a simulated cluster, with or without faults.

The router's core, the gateways' and the workers' rules are the real ones (`infra/simulator`). In a
recorded deployment, each record takes a delay over the log that is sampled from the recorded ones.
One router stands for all of them. `trivium replay --simulate` calls it.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infra.replay.redeciding import with_overrides
from infra.replay.simulation.deployment import (
    SimulatedDeployment,
    on_hardware,
    recorded_deployment,
    with_pools,
)
from infra.replay.simulation.faults import faults_of
from infra.replay.simulation.figures import figures
from infra.replay.simulation.machine import MeasuredGpu
from infra.replay.simulation.report import Findings
from infra.replay.simulation.speeds import MeasuredSpeeds
from infra.replay.simulation.traffic import RecordedTraffic, simulated_load
from infra.simulator.cluster import READY_MS, Cluster, SimFault
from infra.simulator.machine.gpu import SimGpu
from infra.simulator.outcomes import OneOutcome
from infra.traces.trace import Trace
from schemas.errors import ConfigError
from schemas.records import Outcome, OutcomeKind
from streams.agents.router import load_table

AS_RECORDED, AS_IT_WAS = "recorded", "simulated"
LATE_MS = 100.0  # least delay by the changes that counts
_STEPS = 4  # between outputs of an engine, so that faults strike during answers


class _MeasuredCluster(Cluster):
    """A simulated cluster as fast as a recorded one."""

    def __init__(self, speeds: MeasuredSpeeds, *args: Any, **kwargs: Any) -> None:
        self._speeds = speeds
        super().__init__(*args, **kwargs)
        self._draw = random.Random(0)
        self.bus.drawn_ms = self._hop_ms

    def _hop_ms(self, topic: str) -> float:
        samples_ms = self._speeds.requests_ms if topic == "requests" else self._speeds.hops_ms
        return self._draw.choice(samples_ms)

    def gpu_of(self, worker_id: str) -> Callable[..., SimGpu]:
        """Return a constructor of GPUs that take the measured times."""
        return lambda *gpu_args: MeasuredGpu(self._speeds, *gpu_args)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The outcomes of the same requests, by their recorded ids; times in ms."""

    outcomes: dict[str, Outcome]
    unserved: int  # requests that were never sent, as the turn before did not complete

    def figures(self) -> dict[str, Any]:
        """Return the figures of the outcomes, and the number of requests that were not sent."""
        return figures(self.outcomes.values()) | {"unserved": self.unserved}


def simulate(
    deployment: SimulatedDeployment,
    source: RecordedTraffic | Trace,
    faults: Sequence[SimFault] = (),
    *,
    streams: bool = False,
) -> SimulatedRun:
    """Serve the traffic once more, to its end. Raises ConfigError for an unreadable table.

    With `streams`, and with faults, workers report every few tokens instead of the first and last.
    """
    setup = replace(deployment.setup, steps_max=_STEPS if streams or faults else 0)
    load = simulated_load(source, begin_ms=READY_MS, block_tokens=setup.block_tokens)
    args = deployment.shape, setup, deployment.settings
    options: dict[str, Any] = {
        "timeout_ms": deployment.timeout_ms,
        "table": load_table(deployment.settings),
        "gateways": 1,
        "keeps_log": bool(faults),
        "checkers": [OneOutcome()],
        "faults": faults,
        "orchestrations": deployment.orchestrations,
    }
    speeds = deployment.speeds
    cluster = (
        Cluster(*args, **options) if speeds is None else _MeasuredCluster(speeds, *args, **options)
    )
    cluster.run(load.conversations)
    cluster.finish()
    outcomes = {
        load.request_ids[request.request_id]: request.outcome
        for request in cluster.clients.requests
        if request.outcome is not None
    }
    return SimulatedRun(outcomes, len(load.request_ids) - len(outcomes))


@dataclass(frozen=True, slots=True)
class Changes:
    """What a user changes: overrides of router settings as text, faults, and machines by name."""

    overrides: Mapping[str, str]
    faults: Sequence[tuple[str, str]] = ()  # a kind, and a text such as decode-1@12.5s
    pools: str = ""
    gpu: str = ""
    model: str = ""

    @property
    def need_simulation(self) -> bool:
        """Return whether only a simulation can tell what they change."""
        return bool(self.faults or self.pools or self.gpu or self.model)


def what_if(source: RecordedTraffic | Trace, changes: Changes) -> Findings:
    """Simulate the traffic as it was, and again with the changes if there are any.

    Raises ConfigError for changes that cannot be made.
    """
    runs: dict[str, dict[str, Any]] = {}
    if isinstance(source, RecordedTraffic):
        runs[AS_RECORDED] = figures(source.outcomes.values())
    deployment, changed = _deployments(source, changes)
    workers = [name for name, _ in changed.shape.roles()]
    strikes = [fault for kind, text in changes.faults for fault in faults_of(kind, text, workers)]
    before = simulate(deployment, source, streams=bool(strikes))
    runs[AS_IT_WAS] = before.figures()
    if not (changes.overrides or changes.pools or strikes):
        return Findings(workers=workers, runs=runs)
    after = simulate(changed, source, strikes, streams=bool(strikes))
    runs[_name(deployment, changed, changes)] = after.figures()
    return Findings(workers=workers, runs=runs, later_ms=later_ms(before.outcomes, after.outcomes))


def _deployments(
    source: RecordedTraffic | Trace, changes: Changes
) -> tuple[SimulatedDeployment, SimulatedDeployment]:
    """Return the deployment as it was, and with the changes; pools of a trace are in both."""
    if isinstance(source, RecordedTraffic):
        deployment = recorded_deployment(source)
        if changes.gpu or changes.model:
            deployment = on_hardware(deployment, changes.gpu, changes.model)
        changed = with_pools(deployment, changes.pools) if changes.pools else deployment
    elif not changes.pools:
        raise ConfigError("--pools: expected workers such as 2P2D: a trace names none")
    else:
        changed = deployment = with_pools(
            on_hardware(None, changes.gpu, changes.model), changes.pools
        )
    if changes.overrides:
        settings = with_overrides(changed.settings, changes.overrides)
        changed = replace(changed, settings=settings)
    return deployment, changed


def _name(deployment: SimulatedDeployment, changed: SimulatedDeployment, changes: Changes) -> str:
    settings = [f"{name}={value}" for name, value in changes.overrides.items()]
    pools = [changed.shape.name] if changed.shape != deployment.shape else []
    return ", ".join([*settings, *pools, *(f"{kind} {text}" for kind, text in changes.faults)])


def later_ms(before: Mapping[str, Outcome], after: Mapping[str, Outcome]) -> list[float]:
    """Return by how much answers ended later, above `LATE_MS`, in ms, sorted."""
    delays_ms = [
        (outcome.ended_ms - outcome.arrived_ms) - (was.ended_ms - was.arrived_ms)
        for request_id, outcome in after.items()
        if (was := before.get(request_id)) is not None and _is_whole(was) and _is_whole(outcome)
    ]
    return sorted(float(delay_ms) for delay_ms in delays_ms if delay_ms > LATE_MS)


def _is_whole(outcome: Outcome) -> bool:
    return outcome.kind is OutcomeKind.COMPLETED
