"""Faults of all kinds, drawn from a seed."""

from collections.abc import Callable

import numpy as np

from infra.simulator.cluster import SimFault
from infra.simulator.faults.hostile import TOPICS, repeat_record
from infra.simulator.faults.losses import (
    crash,
    cut_gateway,
    drain,
    hang_up,
    lose_gateway,
    lose_router,
    restart,
    restart_gateway,
    slow_log,
)
from infra.simulator.shape import ClusterShape

Draw = np.random.Generator
Draws = Callable[[Draw, float], tuple[SimFault, ...]]


def storm(
    seed: int, shape: ClusterShape, *, gateways: int, count: int, begin_ms: float, end_ms: float
) -> tuple[SimFault, ...]:
    """Return `count` faults of all kinds between two times, for a cluster that keeps its log."""
    draw = np.random.default_rng([seed, count])
    workers = [name for name, _ in shape.roles()]

    def lose_worker(draw: Draw, at_ms: float) -> tuple[SimFault, ...]:
        name = str(draw.choice(workers))
        back_ms = at_ms + draw.uniform(100.0, 4_000.0)
        return crash(at_ms, name), restart(back_ms, name)

    def lose_a_gateway(draw: Draw, at_ms: float) -> tuple[SimFault, ...]:
        name = f"gateway-{draw.integers(gateways)}"
        after_ms = [draw.uniform(0.0, 8_000.0) if draw.random() < 0.6 else None for _ in range(7)]
        back_ms = at_ms + draw.uniform(100.0, 4_000.0)
        return lose_gateway(at_ms, name, after_ms), restart_gateway(back_ms, name)

    kinds: tuple[Draws, ...] = (
        lose_worker,
        lambda draw, at_ms: (
            drain(at_ms, str(draw.choice(workers)), float(draw.uniform(50.0, 3_000.0))),
        ),
        lambda draw, at_ms: tuple(hang_up(at_ms, float(draw.random())) for _ in range(3)),
        lambda draw, at_ms: (repeat_record(at_ms, str(draw.choice(TOPICS))),),
        lambda draw, at_ms: (repeat_record(at_ms, str(draw.choice(TOPICS))),),
        lambda draw, at_ms: (
            slow_log(at_ms, float(draw.uniform(5.0, 80.0)), float(draw.uniform(100.0, 2_000.0))),
        ),
        lambda draw, at_ms: (
            lose_router(at_ms, int(draw.integers(4)), float(draw.uniform(200.0, 2_500.0))),
        ),
        lose_a_gateway,
        lambda draw, at_ms: (
            cut_gateway(at_ms, f"gateway-{draw.integers(gateways)}", draw.uniform(100.0, 3_000.0)),
        ),
    )
    times = sorted(draw.uniform(begin_ms, end_ms, count).tolist())
    return tuple(
        fault for at_ms in times for fault in kinds[int(draw.integers(len(kinds)))](draw, at_ms)
    )
