"""A load of day and night: worker-hours of autoscaled pools, against the best fixed fleet.

Requests arrive as a Poisson process whose rate goes from night to noon and back as a squared sine.
The same requests go to autoscaled pools (`infra/simulator/elastic.py`) and to fixed fleets of every
split, the smallest first. A fleet holds if at least the share `HOLDS` of all requests meets the
TTFT and TPOT targets. The best fixed fleet is the smallest that holds: it must be large enough for
noon, and its operator must know that in advance.

The day is some minutes long. A real one gives pools proportionally more time to follow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from infra.planning.point import ORDERS, TICK_MS
from infra.planning.runs import Runner
from infra.scaling.settings import ScalingSettings
from infra.simulator.cluster import READY_MS, Cluster
from infra.simulator.elastic import Elastic, FleetWatcher, worker_hours
from infra.simulator.machine.latency import Setup
from infra.simulator.outcomes import OneOutcome
from infra.simulator.shape import ClusterShape
from infra.simulator.traffic.poisson import unique_tokens
from infra.simulator.traffic.script import SimConversation, SimTurn, conversation
from schemas.records import Role
from streams.config import RouterSettings

TIMEOUT_MS = 120_000
HOLDS = 0.99  # least share of requests that meet the targets
Counts = list[tuple[float, dict[Role, int]]]  # workers by role, over time in ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """The traffic, the latency targets, and the time that a worker takes to start."""

    night_per_s: float = 1.0
    noon_per_s: float = 24.0
    minutes: float = 30.0
    days: int = 1
    prompt_tokens: int = 4_000
    answer_tokens: int = 200
    ttft_ms: int = 1_000
    tpot_ms: float = 25.0
    start_ms: float = 20_000.0
    workers_max: int = 12
    seed: int = 1
    setup: Setup = field(default_factory=lambda: Setup(running_max=24))

    @property
    def day_ms(self) -> float:
        return self.minutes * 60_000

    @property
    def end_ms(self) -> float:
        return READY_MS + self.days * self.day_ms

    def per_s(self, at_ms: float) -> float:
        """Return the arrival rate at a time; it is lowest at 0."""
        share = np.sin(np.pi * at_ms / self.day_ms) ** 2
        return float(self.night_per_s + (self.noon_per_s - self.night_per_s) * share)

    def requests(self) -> list[SimConversation]:
        """Draw the day's requests, of one turn each, by thinning."""
        draw = np.random.default_rng(self.seed)
        conversations: list[SimConversation] = []
        at_ms = 0.0
        while (at_ms := at_ms + draw.exponential(1_000 / self.noon_per_s)) < self.end_ms - READY_MS:
            name = len(conversations)
            if draw.random() * self.noon_per_s > self.per_s(at_ms):
                continue
            turn = SimTurn(prompt_tokens=self.prompt_tokens, output_tokens=self.answer_tokens)
            tokens = unique_tokens(name, self.prompt_tokens + self.answer_tokens)
            conversations.append(
                conversation(
                    f"day-{name}", READY_MS + at_ms, [turn], tokens, self.setup.block_tokens
                )
            )
        return conversations


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """Figures of one fleet that served the day."""

    pools: str  # such as 2P3D; empty: autoscaled
    requests: int
    in_time: float  # share of requests that met the targets
    worker_hours: float
    ttft_p99_ms: float
    tpot_p99_ms: float
    counts: Counts
    failed: int = 0  # of the requests

    @property
    def holds(self) -> bool:
        return self.in_time >= HOLDS


def serve_day(day: Day, pools: str) -> FleetResult:
    """Serve the day with a fixed fleet, or with autoscaled pools, which begin with 1P1D."""
    fleet_view = FleetWatcher()
    settings = RouterSettings(policy="static", tick_ms=TICK_MS)
    cluster = Cluster(
        ClusterShape.parse(pools or "1P1D"),
        day.setup,
        settings,
        timeout_ms=TIMEOUT_MS,
        orchestrations=ORDERS,
        checkers=[OneOutcome(), fleet_view],
    )
    elastic = Elastic(cluster, fleet_view, _targets(day), day.start_ms)
    if not pools:
        cluster.clock.at(READY_MS, elastic.begin)
    requests = day.requests()
    cluster.run(requests)
    cluster.finish()
    shape = ClusterShape.parse(pools)
    fixed = {Role.PREFILL: shape.prefill, Role.DECODE: shape.decode}
    counts = elastic.counts if not pools else [(READY_MS, fixed)]
    answers = [request for request in cluster.clients.requests if request.completed]
    times_ms = [(answer.ttft_ms, answer.tpot_ms) for answer in answers]
    return fleet_of(day, pools, counts, times_ms, len(requests))


def _targets(day: Day) -> ScalingSettings:
    return ScalingSettings(
        ttft_ms=day.ttft_ms,
        tpot_ms=day.tpot_ms,
        workers_max=day.workers_max,
        start_ms=int(day.start_ms),
        up_after_ms=1_000,
    )


def fleet_of(
    day: Day, pools: str, counts: Counts, times_ms: Sequence[tuple[float, float]], requests: int
) -> FleetResult:
    """Sum up how a fleet served the day; requests that failed are not in time.

    `times_ms` has TTFT and TPOT of each completed request.
    """
    ttft, tpot = np.array(times_ms).T
    return FleetResult(
        pools=pools,
        requests=requests,
        in_time=float(np.sum((ttft <= day.ttft_ms) & (tpot <= day.tpot_ms))) / requests,
        worker_hours=worker_hours(counts, READY_MS, day.end_ms),
        ttft_p99_ms=float(np.percentile(ttft, 99)),
        tpot_p99_ms=float(np.percentile(tpot, 99)),
        counts=counts,
        failed=requests - len(times_ms),
    )


def splits(workers: int) -> Iterator[str]:
    """Yield every fixed fleet of `workers` workers."""
    return (f"{prefill}P{workers - prefill}D" for prefill in range(1, workers))


@dataclass(frozen=True, slots=True, kw_only=True)
class DayComparison:
    """The autoscaled pools, and the fixed fleets up to the smallest that holds as well."""

    day: Day
    following: FleetResult
    fixed: list[FleetResult]

    @property
    def best(self) -> FleetResult | None:
        """Return the smallest fixed fleet with as large a share in time; of these, the one with the
        most."""
        bar = min(HOLDS, self.following.in_time)
        candidates = [fleet for fleet in self.fixed if fleet.in_time >= bar]
        return min(candidates, key=lambda fleet: (fleet.worker_hours, -fleet.in_time), default=None)

    @property
    def saved_share(self) -> float:
        """Return the saved share of the best fixed fleet's worker-hours; below 0 if autoscaling
        uses more."""
        return 1 - self.following.worker_hours / self.best.worker_hours if self.best else 0.0


def _serve_task(task: tuple[Day, str]) -> FleetResult:
    return serve_day(*task)


def compare_fleets(pool: Runner, day: Day) -> DayComparison:
    """Compare the autoscaled pools with fixed fleets, from the pools' mean size upwards."""
    (following,) = pool.map("following", _serve_task, [(day, "")])
    mean = following.worker_hours * 3_600_000 / (day.end_ms - READY_MS)
    fixed: list[FleetResult] = []
    for workers in range(max(2, int(mean)), day.workers_max + 1):
        tasks = [(day, pools) for pools in splits(workers)]
        fixed += pool.map(f"{workers} workers", _serve_task, tasks)
        if DayComparison(day=day, following=following, fixed=fixed).best is not None:
            break
    return DayComparison(day=day, following=following, fixed=fixed)
