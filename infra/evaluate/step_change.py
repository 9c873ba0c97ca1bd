"""A step change: prefill workers become twice as slow while it runs; how soon is `learned` good?

The same arrivals meet every fixed share and `learned`, all with the same change. Later turns are
cut into windows of 100, about 200 requests, by the time they were sent; a window's regret is that
of `regret.py`, with the window's x=0 as reference and the best fixed share of the window as rival.
"""

from dataclasses import dataclass

import numpy as np

from infra.evaluate.grid import RATIOS, SHARES, Config, Workload, static
from infra.evaluate.point import Spec, make_cluster
from infra.evaluate.regret import WEIGHTS
from infra.evaluate.runs import Runner
from infra.simulator.clients import Served
from infra.simulator.cluster import READY_MS, Shape
from infra.simulator.faults import slow_prefill
from infra.simulator.workload import Profile, poisson
from infra.simulator.workload import Shape as Turns

CHANGE_MS = 30_000.0
DURATION_MS = 90_000.0
WINDOW = 100  # later turns: 200 requests
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One ratio: `learned`'s regret in the window before the change, and in those after it."""

    pools: str
    before: float
    after: list[float]
    local_before: float  # share of later turns that `learned` placed locally
    local_after: float

    @property
    def holds(self) -> bool:
        """Within the bound after the first window."""
        return len(self.after) > 1 and all(value <= REGRET_MAX for value in self.after[1:])


def step_changes(runner: Runner, seed: int) -> list[Recovery]:
    """Every ratio."""
    configs = [
        config
        for pools in RATIOS
        for config in (
            *(static(pools, share) for share in SHARES),
            Config(pools=pools, policy="learned"),
        )
    ]
    specs = [
        Spec(
            config=config,
            workload=WORKLOAD,
            loads_per_s=(LOAD_PER_S,),
            seed=seed,
            conversations_max=0,
        )
        for config in configs
    ]
    found = dict(zip(configs, runner.map("step change", _served, specs), strict=True))
    return [recovery(pools, found) for pools in RATIOS]


Turn = tuple[float, float, float, bool]  # sent, TTFT, TPOT, local


def _served(spec: Spec) -> list[Turn]:
    """The later turns in order of sending."""
    slow = [f"prefill-{i}" for i in range(Shape.parse(spec.config.pools).prefill)]
    fault = slow_prefill(READY_MS + CHANGE_MS, slow, TIMES_SLOWER)
    cluster = make_cluster(spec, faults=[fault])
    cluster.run(
        poisson(
            spec.workload.profile,
            per_s=spec.loads_per_s[0],
            duration_ms=DURATION_MS,
            begin_ms=READY_MS,
            block_tokens=spec.setup.block_tokens,
            seed=[spec.seed],
            name="step",
        )
    )
    later = [each for each in cluster.clients.served if each.turn > 1]
    return [_turn(each) for each in sorted(later, key=lambda each: each.sent_ms)]


def _turn(each: Served) -> Turn:
    if not each.completed:
        late_ms = 30_000.0
        return each.sent_ms, late_ms, late_ms / each.output_tokens, False
    return each.sent_ms, each.ttft_ms, each.tpot_ms, each.mode.value == "local"


def recovery(pools: str, found: dict[Config, list[Turn]]) -> Recovery:
    learned = found[Config(pools=pools, policy="learned")]
    fixed = [found[static(pools, share)] for share in SHARES]
    change = sum(turn[0] < READY_MS + CHANGE_MS for turn in learned)
    starts = range(change, min(len(learned), *map(len, fixed)) - WINDOW, WINDOW)
    return Recovery(
        pools=pools,
        before=_regret(learned, fixed, change - WINDOW),
        after=[_regret(learned, fixed, start) for start in starts],
        local_before=float(np.mean([turn[3] for turn in learned[:change]])),
        local_after=float(np.mean([turn[3] for turn in learned[change + WINDOW :]])),
    )


def _regret(learned: list[Turn], fixed: list[list[Turn]], start: int) -> float:
    def mean(turns: list[Turn], figure: int) -> float:
        return float(np.mean([turn[figure] for turn in turns[start : start + WINDOW]]))

    def cost(turns: list[Turn]) -> float:
        ttft, tpot = mean(turns, 1) / mean(fixed[0], 1), mean(turns, 2) / mean(fixed[0], 2)
        return WEIGHTS[0] * ttft + WEIGHTS[1] * tpot

    return cost(learned) / min(cost(turns) for turns in fixed) - 1
