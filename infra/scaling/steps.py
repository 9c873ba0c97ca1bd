"""The steps from the present workers to the target: which move, start or drain.

A worker that one pool can spare and another wants moves: its engine stays up. Pure; the launcher
carries the steps out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infra.scaling.fleet_meter import LLM
from schemas.records import Role


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start one more worker in a role."""

    role: Role


@dataclass(frozen=True, slots=True)
class DrainWorker:
    """Drain a worker: it leaves when it has finished its active requests."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class MoveWorker:
    """Give a worker another role; it keeps its engine and its caches."""

    worker_id: str
    role: Role


Step = StartWorker | DrainWorker | MoveWorker


def steps(workers: Mapping[Role, Sequence[str]], targets: Mapping[Role, int]) -> list[Step]:
    """Return the steps to the targets; `workers` lists the most dispensable workers last."""
    pools = [(role, workers.get(role, ()), targets[role]) for role in LLM if role in targets]
    spare = [name for _, worker_ids, target in pools for name in worker_ids[target:]]
    lacking = [role for role, worker_ids, target in pools for _ in range(target - len(worker_ids))]
    moves = [MoveWorker(spare.pop(), role) if spare else StartWorker(role) for role in lacking]
    return [*moves, *map(DrainWorker, spare)]
