"""Kills a bridge, a router, a worker or a gateway every 5 s, and the broker twice.

The kinds take turns in an order drawn from a seed. The broker is killed after one third of the
work, and again after two thirds. `infra/bench/faults/kill_schedule.py` injects the kills.
"""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from infra.bench.faults.kill_schedule import BROKER, KILL, FaultInjector, InjectedFault
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan

EVERY_S = 5.0
BROKER_AT = (1 / 3, 2 / 3)  # shares of the work
_LOOK_S = 0.2


class Kills:
    """Injects all kills of one stack."""

    def __init__(self, stack: Stack, seed: int, every_s: float = EVERY_S) -> None:
        self._injector, self._every_s = FaultInjector(stack), every_s
        self._names = victims(stack.plan, seed)

    @property
    def kill_counts(self) -> dict[str, int]:
        """Number of kills by process name."""
        return {name: count for (name, _), count in sorted(self._injector.fault_counts.items())}

    async def run(self, done_share: Callable[[], float]) -> None:
        """Kill processes until cancelled; `done_share` returns the share of the work done."""
        loop, broker_at = asyncio.get_running_loop(), list(BROKER_AT)
        due_s = loop.time() + self._every_s
        while True:
            await asyncio.sleep(_LOOK_S)
            if broker_at and done_share() >= broker_at[0]:
                broker_at.pop(0)
                await self._kill(BROKER)
            if loop.time() >= due_s:
                due_s += self._every_s
                await self._kill(next(self._names))

    async def _kill(self, name: str) -> None:
        await self._injector.inject(InjectedFault(at_s=0.0, name=name, how=KILL))


def victims(plan: StackPlan, seed: int) -> Iterator[str]:
    """Yield process names forever: the kinds in turn, and of each kind a random process."""
    rng = random.Random(f"kills {seed}")
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, kind in plan.names().items():
        kinds["bridge" if name.startswith("bridge-") else kind].append(name)
    while True:
        for names in rng.sample(list(kinds.values()), len(kinds)):
            yield rng.choice(names)


def kills_between(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """Return the kills that happened between two counts."""
    return dict(Counter(after) - Counter(before))
