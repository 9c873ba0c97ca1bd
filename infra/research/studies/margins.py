"""Table 2's throughput in words: the margins of the winners, here and in the authors' results."""

import numpy as np

from infra.planning.grid import CONFIGS, LEVELS
from infra.planning.runs import Points
from infra.research.paper import ppd_paper
from infra.research.paper.paper_tables import OBJECTIVES, Winners, winners

NEAR = 0.01  # a smaller lead is due to chance


def explanation(points: Points) -> str:
    """Return the winners' leads over the best x=1, and what decided in the paper, in words."""
    won = winners(points, OBJECTIVES["throughput"])
    by_level = ", ".join(_lead(points, won, level) for level in LEVELS)
    raw = ppd_paper.THROUGHPUT_LONG_GEN_20
    rates = ", ".join(f"{name} {tokens}" for name, tokens in raw.items())
    p50, mean, p99 = ppd_paper.TPOT_REPLICAS_LONG_GEN_20
    even = raw["4R"] * mean / p50
    return (
        "Throughput is completion tokens of both turns over the time from the first arrival to the "
        "last answer, as the authors compute it. Behind the same arrivals it is nearly the same "
        f"everywhere: the winner leads the best x=1 by {by_level}. The authors draw arrivals "
        "anew for each configuration, without a seed: at 1/s 4R served 10 conversations and "
        "2P2D x=1 served 7 (`large, tiny`: 602 and 422 tokens/s), at 8/s 64 and 80 "
        "(`large, long gen`). With equal numbers their own leads are as small, "
        f"but for replicas: {rates} tokens/s (`large, long gen`, 20/s). Replicas lose there by "
        f"what looks like one slow server: first turns take {p50} ms per token in the median, "
        f"{mean} in the mean and {p99} in the 99th percentile, where 1P3D x=1 has 10.4, 10.5 and "
        "11.5; with ten conversations in all (`large, tiny`, 1/s) the median is 8.0 ms and the "
        "99th percentile 10.2 with 4R, 8.3 and 8.4 with 1P3D x=1. At the median's pace 4R would "
        f"make {even:.0f} tokens/s at 20/s. Nothing in the model makes one of equal servers slow."
    )


def _lead(points: Points, won: Winners, level: str) -> str:
    full = [config for config in CONFIGS if config.kind == "x=1"]
    leads = []
    for (workload, load), config in won.items():
        if load in LEVELS[level]:
            best = max(points[rival, workload, load].tokens_per_s for rival in full)
            leads.append(points[config, workload, load].tokens_per_s / best - 1)
    if not leads:
        return f"nothing at {level} load"
    near = np.mean([lead < NEAR for lead in leads])
    return f"{np.median(leads):.1%} at {level} load (below {NEAR:.0%} at {near:.0%} of the points)"
