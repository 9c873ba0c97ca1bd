"""A step change: prefill workers become twice as slow during a run; how soon does `learned` adapt?

Every fixed share and `learned` serve the same conversations of two requests each, with the same
change. Conversations are grouped by their begin into windows of 100 (200 requests): one before the
change, after the first 100 conversations, and those after the change. A window's regret is that of
`regret.py`, with the window's x=0 as reference and the x with the least cost there.

With one seed a window's regret has an error of 1 to 3 points, so windows of several seeds, from the
evaluation's own seed on, are pooled: means are over all their turns. The bar applies to every
pooled window but the first after the change. It counts the first tokens of later turns only, while
`learned` trades some of these for a greater gain of first turns; so a second row counts all turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infra.planning.grid import RATIOS, SHARES, Config, Workload, static
from infra.planning.point import Spec, costs, serve
from infra.planning.runs import Runner
from infra.research.studies.regret import WEIGHTS
from infra.simulator.cluster import READY_MS, Cluster, SimFault
from infra.simulator.traffic.poisson import Profile
from infra.simulator.traffic.poisson import TurnShape as Turns
from schemas.records import Mode, Role

CHANGE_MS = 30_000.0
DURATION_MS = 90_000.0
WINDOW = 100  # conversations: 200 requests
TIMES_SLOWER = 2.0
LOAD_PER_S = 8.0
WORKLOAD = Workload(
    name="long prompts",
    profile=Profile(
        first=Turns(input_tokens=2_048, output_tokens=128),
        later=Turns(input_tokens=512, output_tokens=128),
    ),
)
REGRET_MAX = 0.10
LATER, ALL = "later turns", "all turns"  # the turns whose time to first token counts


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedRun:
    """How one configuration served the conversations of one seed, in order of their begin."""

    began_ms: NDArray[np.float64]
    ttft_ms: NDArray[np.float64]  # (conversations, turns)
    tpot_ms: NDArray[np.float64]
    local: NDArray[np.bool_]  # whether the later turn was local

    @property
    def change(self) -> int:
        """Return the index of the first conversation after the change."""
        return int(np.searchsorted(self.began_ms, READY_MS + CHANGE_MS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Regret before the change, and in each window after it."""

    before: float
    after: list[float]

    @property
    def mean(self) -> float:
        """Return the mean regret of all windows but the first after the change."""
        return float(np.mean(self.after[1:]))

    @property
    def after_text(self) -> str:
        """Return the regrets of successive windows as text."""
        return ", ".join(f"{regret:.1%}" for regret in self.after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Regret of one ratio before and after the change."""

    pools: str
    counted: str  # `LATER` or `ALL`
    pooled: Windows
    seeds: dict[int, Windows]
    local_before: float  # share of later turns that `learned` placed locally
    local_after: float  # likewise after the first window

    @property
    def holds(self) -> bool:
        """Return whether every window but the first stays within `REGRET_MAX`."""
        return len(self.pooled.after) > 1 and max(self.pooled.after[1:]) <= REGRET_MAX

    @property
    def error(self) -> float:
        """Return the standard error of the mean after the first window, over seeds; needs two
        seeds."""
        means = [windows.mean for windows in self.seeds.values()]
        return float(np.std(means, ddof=1) / len(means) ** 0.5)


SeedRuns = dict[Config, ChangedRun]  # of one seed


def step_changes(runner: Runner, seed: int, seeds: int) -> list[Recovery]:
    """Run every ratio with `seeds` seeds, from `seed` on."""
    keys = [
        (pools, run_seed, config)
        for pools in RATIOS
        for run_seed in range(seed, seed + seeds)
        for config in _configs(pools)
    ]
    specs = [
        Spec(
            config=config,
            workload=WORKLOAD,
            loads_per_s=(LOAD_PER_S,),
            seed=run_seed,
            conversations_max=0,
        )
        for _, run_seed, config in keys
    ]
    runs_by_seed: dict[str, dict[int, SeedRuns]] = {pools: {} for pools in RATIOS}
    for (pools, run_seed, config), run in zip(
        keys, runner.map("step change", _run, specs), strict=True
    ):
        runs_by_seed[pools].setdefault(run_seed, {})[config] = run
    return [recovery(pools, kind, runs_by_seed[pools]) for pools in RATIOS for kind in (LATER, ALL)]


def _configs(pools: str) -> list[Config]:
    return [*(static(pools, share) for share in SHARES), _learned(pools)]


def _learned(pools: str) -> Config:
    return Config(pools=pools, policy="learned")


def _slow_prefill(cluster: Cluster) -> None:
    for worker in cluster.workers.values():
        if worker.roles == (Role.PREFILL,):
            worker.process.engine.gpu.slow_prefill = TIMES_SLOWER


def _run(spec: Spec) -> ChangedRun:
    (load,) = spec.loads_per_s
    conversations = spec.arrivals(load, begin_ms=READY_MS, duration_ms=DURATION_MS, name="step")
    cluster = serve(spec, conversations, [SimFault(READY_MS + CHANGE_MS, _slow_prefill)])
    answers = [request for request in cluster.clients.requests if request.completed]
    local = {
        answer.session_id for answer in answers if answer.turn > 1 and answer.mode is Mode.LOCAL
    }
    ttft_ms, tpot_ms = costs(conversations, answers)
    return ChangedRun(
        began_ms=np.array([conversation.at_ms for conversation in conversations]),
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        local=np.array([conversation.session_id in local for conversation in conversations]),
    )


def recovery(pools: str, counted: str, seeds: dict[int, SeedRuns]) -> Recovery:
    """Compute the recovery of a ratio from all its configurations, seed by seed."""
    learned = [seed_runs[_learned(pools)] for seed_runs in seeds.values()]
    before = [run.local[: run.change] for run in learned]
    after = [run.local[run.change + WINDOW :] for run in learned]
    return Recovery(
        pools=pools,
        counted=counted,
        pooled=_windows(pools, counted, list(seeds.values())),
        seeds={seed: _windows(pools, counted, [seed_runs]) for seed, seed_runs in seeds.items()},
        local_before=float(np.mean(np.concatenate(before))),
        local_after=float(np.mean(np.concatenate(after))),
    )


def _windows(pools: str, counted: str, seeds: Sequence[SeedRuns]) -> Windows:
    changes = [seed_runs[_learned(pools)].change for seed_runs in seeds]
    sizes = [len(seed_runs[_learned(pools)].began_ms) for seed_runs in seeds]
    count = min(size - change for size, change in zip(sizes, changes, strict=True)) // WINDOW

    def regret(starts: Sequence[int]) -> float:
        return _regret(pools, counted, list(zip(seeds, starts, strict=True)))

    return Windows(
        before=regret([WINDOW] * len(seeds)),
        after=[regret([change + i * WINDOW for change in changes]) for i in range(count)],
    )


def _regret(pools: str, counted: str, windows: list[tuple[SeedRuns, int]]) -> float:
    """Compute the regret over the windows that begin at these conversations."""
    first_turn = 1 if counted == LATER else 0

    def means(config: Config) -> tuple[float, float]:
        runs = [(seed_runs[config], slice(start, start + WINDOW)) for seed_runs, start in windows]
        ttft_ms = np.concatenate([run.ttft_ms[cut, first_turn:] for run, cut in runs])
        tpot_ms = np.concatenate([run.tpot_ms[cut] for run, cut in runs])
        return float(np.mean(ttft_ms)), float(np.mean(tpot_ms))

    base_ttft_ms, base_tpot_ms = means(static(pools, "0"))

    def cost(config: Config) -> float:
        ttft_ms, tpot_ms = means(config)
        return WEIGHTS[0] * ttft_ms / base_ttft_ms + WEIGHTS[1] * tpot_ms / base_tpot_ms

    return cost(_learned(pools)) / min(cost(static(pools, share)) for share in SHARES) - 1
