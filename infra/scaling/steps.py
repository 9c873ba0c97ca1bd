"""From the workers that are there to those that are to be there: who moves, who starts, who leaves.

A worker that one pool can spare and another wants is moved: its engine stays up. Pure; the launcher
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
    """Drain a worker: it leaves when it has finished what it holds."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class MoveWorker:
    """A worker gets another role, and keeps its engine and its caches."""

    worker_id: str
    role: Role


Step = StartWorker | DrainWorker | MoveWorker


def steps(workers: Mapping[Role, Sequence[str]], targets: Mapping[Role, int]) -> list[Step]:
    """What is to be done; `workers` has those that can best be spared last."""
    pools = [(role, workers.get(role, ()), targets[role]) for role in LLM if role in targets]
    spare = [name for _, worker_ids, target in pools for name in worker_ids[target:]]
    lacking = [role for role, worker_ids, target in pools for _ in range(target - len(worker_ids))]
    moves = [MoveWorker(spare.pop(), role) if spare else StartWorker(role) for role in lacking]
    return [*moves, *map(DrainWorker, spare)]
