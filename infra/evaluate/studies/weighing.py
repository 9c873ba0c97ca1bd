"""Figure 5 in its own set-up: weights against TTFT and TPOT on prefill-heavy conversations.

500 of them, 1P3D, at two loads; `learned` with w_ttft 1 and a rising w_tpot, beside plain x=0,
which is static. The authors take conversations of ShareGPT and WildChat; here they are drawn like
ShareGPT's, and such are kept in which more is asked than answered.
"""

from dataclasses import dataclass, replace

import numpy as np

from infra.evaluate.paper import ppd_paper
from infra.evaluate.paper.grid import CONVERSATIONS_MAX, WORKLOADS, Config, static
from infra.evaluate.points.point import Spec, served
from infra.evaluate.points.runs import Runner
from infra.evaluate.studies import sharegpt
from schemas.records import Mode

POOLS = "1P3D"
LOADS_PER_S = (8.0, 16.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """One configuration at one load; changes from plain x=0 in percent."""

    name: str  # `x=0 plain`, or the weight of TPOT
    load_per_s: float
    local_share: float  # of later turns
    ttft_ms: float  # mean of later turns, of the decode worker's first token
    tpot_ms: float  # mean
    failed: int
    ttft_change: float = 0.0
    tpot_change: float = 0.0


def weighed(runner: Runner, seed: int, *, quick: bool) -> list[Weighed]:
    """Plain x=0 and every weight, at both loads."""
    count = sharegpt.CONVERSATIONS // (5 if quick else 1)
    weights = (-1.0, *ppd_paper.FIGURE_5_LOCAL)  # the first: none
    tasks = [(w_tpot, load, count, seed) for load in LOADS_PER_S for w_tpot in weights]
    found = runner.map("weights as published", _run, tasks)
    plain = {row.load_per_s: row for row in found[:: len(weights)]}
    return [_beside(row, plain[row.load_per_s]) for row in found]


def _run(task: tuple[float, float, int, int]) -> Weighed:
    w_tpot, load, count, seed = task
    fixed = w_tpot < 0
    spec = Spec(
        config=static(POOLS, "0", plain=True) if fixed else Config(pools=POOLS, policy="learned"),
        workload=WORKLOADS[0],
        loads_per_s=(load,),
        seed=seed,
        weights=(-1.0, -1.0) if fixed else (1.0, w_tpot),
        conversations_max=CONVERSATIONS_MAX,
    )
    held = sharegpt.conversations(load, count, spec.setup.block_tokens, seed, prefill_heavy=True)
    done = [each for each in served(spec, held).clients.served if each.completed]
    later = [each for each in done if each.turn > 1]
    return Weighed(
        name="x=0 plain" if fixed else f"w_tpot {w_tpot:g}",
        load_per_s=load,
        local_share=float(np.mean([each.mode is Mode.LOCAL for each in later])),
        ttft_ms=float(np.mean([each.decode_ttft_ms for each in later])),
        tpot_ms=float(np.mean([each.tpot_ms for each in done])),
        failed=sum(len(each.turns) for each in held) - len(done),
    )


def _beside(row: Weighed, plain: Weighed) -> Weighed:
    return replace(
        row,
        ttft_change=100 * (row.ttft_ms / plain.ttft_ms - 1),
        tpot_change=100 * (row.tpot_ms / plain.tpot_ms - 1),
    )
