"""The load of a pool, or of one shard of the retrieval pool. Decides nothing."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from schemas.records import Role

LLM = (Role.PREFILL, Role.DECODE, Role.REPLICA)


class PoolKey(NamedTuple):
    """The workers of one role and model; retrieval workers have no model."""

    role: Role
    model: str = ""

    @property
    def is_llm(self) -> bool:
        return self.role in LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """The load of one role's workers, or of one shard of the retrieval pool."""

    present: int = 0  # workers that are alive and ready
    under_way: float = 0.0  # mean number of active answers or searches
    slots: float = 0.0  # mean per worker
    kv_tokens: float = 0.0  # of KV memory, mean per worker; 0: unknown
    per_s: float = 0.0  # searches that all workers answer
    pace_per_s: float = 0.0  # searches that one full worker answers; 0: unknown


def mean(values: Iterable[float]) -> float:
    """Return the mean, or 0 if there are no values."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
