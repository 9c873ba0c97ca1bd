"""The steps from the present workers to the target: which move, start or drain.

A worker that one pool can spare and another of the same model wants moves: its engine stays up. For
another model it is drained, and loads that model in its place. Pure; the launcher carries the steps
out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infra.scaling.pools import LLM, PoolKey
from schemas.records import Role


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start one more worker of a pool."""

    pool: PoolKey


@dataclass(frozen=True, slots=True)
class DrainWorker:
    """Drain a worker: it leaves when it has finished its active requests."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class MoveWorker:
    """Give a worker another role; it keeps its engine and its caches."""

    worker_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class ReloadWorker:
    """Drain a worker, and start it again in a pool of another model."""

    worker_id: str
    pool: PoolKey


Step = StartWorker | DrainWorker | MoveWorker | ReloadWorker


def steps(workers: Mapping[PoolKey, Sequence[str]], targets: Mapping[PoolKey, int]) -> list[Step]:
    """Return the steps to the targets; `workers` lists the most dispensable workers last."""
    moves: list[Step] = []
    spare, lacking = list[str](), list[PoolKey]()
    models = dict.fromkeys(pool.model for pool in targets if pool.is_llm)
    for model in models:
        pools = [
            (pool, workers.get(pool, ()), targets[pool])
            for pool in (PoolKey(role, model) for role in LLM)
            if pool in targets
        ]
        spare_here = [name for _, names, target in pools for name in names[target:]]
        for pool, names, target in pools:
            for _ in range(target - len(names)):
                if spare_here:
                    moves.append(MoveWorker(spare_here.pop(), pool.role))
                else:
                    lacking.append(pool)
        spare += spare_here
    reloads = [ReloadWorker(spare.pop(), pool) if spare else StartWorker(pool) for pool in lacking]
    return [*moves, *reloads, *map(DrainWorker, spare)]
