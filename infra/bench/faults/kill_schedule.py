"""Draws from a seed which process gets which signal and when, and injects it into a running stack.

`draw` and `victims` are pure. `FaultInjector` counts its faults, so that callers can distinguish a
process that ended by itself from one that was killed. `KillsInTurn` kills beside a load.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from infra.broker.node import Broker
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan

BROKER = "broker"
KILL, FREEZE, STOP = "kill", "freeze", "stop"  # SIGKILL; SIGSTOP, then SIGCONT; SIGTERM
FREEZE_S = (0.3, 6.0)  # shorter and longer than a lease
KILL_EVERY_S = 5.0
BROKER_AT = (1 / 3, 2 / 3)  # shares of the work
_POLL_S, _LOOK_S = 0.05, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """One fault: its time, its process and its kind."""

    at_s: float
    name: str
    how: str
    lasts_s: float = 0.0  # of a freeze, or of an outage of the broker


def draw(
    names: Sequence[str],
    *,
    seconds: float,
    every_s: float,
    broker_kills: int,
    rng: random.Random,
) -> list[InjectedFault]:
    """Return every fault of a run, by time: one process each time, and the broker in between."""
    faults = []
    for number in range(1, int(seconds / every_s - 1e-9) + 1):
        how = rng.choice((KILL, FREEZE, STOP))
        lasts_s = rng.uniform(*FREEZE_S) if how == FREEZE else 0.0
        name = rng.choice(names)
        faults.append(InjectedFault(at_s=number * every_s, name=name, how=how, lasts_s=lasts_s))
    for number in range(1, broker_kills + 1):
        at_s = (number / (broker_kills + 1)) * seconds + every_s / 2
        faults.append(InjectedFault(at_s=at_s, name=BROKER, how=KILL))
    return sorted(faults, key=lambda fault: fault.at_s)


class FaultInjector:
    """Injects faults into the processes of a stack and its broker."""

    def __init__(
        self, stack: Stack, on_fault: Callable[[InjectedFault], None] = lambda fault: None
    ) -> None:
        self._stack, self._on_fault = stack, on_fault  # called before each fault
        self._broker = Broker(stack.settings.broker, stack.folder / "broker")
        self._frozen: set[str] = set()
        self.fault_counts: Counter[tuple[str, str]] = Counter()  # by process and kind
        self.skipped_faults = 0  # the process was down, or frozen

    async def follow(self, faults: Sequence[InjectedFault]) -> None:
        """Inject all faults, each at its time."""
        began_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                await asyncio.sleep(began_s + fault.at_s - asyncio.get_running_loop().time())
                group.create_task(self.inject(fault))

    async def inject(self, fault: InjectedFault) -> None:
        """Inject one fault; returns when a freeze is over, or the broker may start again."""
        is_broker = fault.name == BROKER
        if not is_broker and (
            fault.name in self._frozen or not self._stack.processes[fault.name].pid
        ):
            self.skipped_faults += 1
            return
        self._on_fault(fault)
        if is_broker:
            await self._kill_broker(fault.lasts_s)
        elif fault.how == FREEZE:
            await self._freeze(fault)
        else:
            number = signal.SIGTERM if fault.how == STOP else signal.SIGKILL
            await self._stack.kill(fault.name, number)
        self.fault_counts[fault.name, fault.how] += 1

    async def _freeze(self, fault: InjectedFault) -> None:
        pid = self._stack.processes[fault.name].pid
        self._frozen.add(fault.name)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            self._frozen.discard(fault.name)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _kill_broker(self, away_s: float) -> None:
        """Kill the broker, and for `away_s` again each time the launcher has restarted it."""
        end_s = asyncio.get_running_loop().time() + away_s
        while True:
            if pid := self._broker.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if asyncio.get_running_loop().time() >= end_s:
                return
            await asyncio.sleep(_POLL_S)


class KillsInTurn:
    """Kills one process of a kind after the other, and the broker after shares of the work."""

    def __init__(self, stack: Stack, seed: int, every_s: float = KILL_EVERY_S) -> None:
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
