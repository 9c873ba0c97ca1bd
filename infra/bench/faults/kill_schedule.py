"""Which process is killed or frozen when, drawn from a seed; and doing it to a running stack.

`draw` is pure. `Killer` keeps count of what it did, so that a process that ended by itself can be
told from one that was killed.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from infra.broker.node import Broker
from infra.stack.launcher import Stack

BROKER = "broker"
KILL, FREEZE = "kill", "freeze"
PAUSE_S = (2.0, 5.0)  # between two blows
FREEZE_S = (0.3, 6.0)  # some end before a lease does, some after
FREEZE_SHARE = 0.4
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One kill or freeze."""

    at_s: float
    name: str
    how: str
    lasts_s: float = 0.0  # of a freeze; of a broker that is kept away


def draw(
    names: Sequence[str],
    *,
    seconds: float,
    broker_every_s: float,
    broker_away_s: float,
    rng: random.Random,
) -> list[Blow]:
    """Every blow of a run, by time: a process every 2 to 5 s, the broker in between.

    Of the broker's kills the middle one keeps it away.
    """
    blows, at_s = [], rng.uniform(*PAUSE_S)
    while at_s < seconds:
        name = rng.choice(names)
        if rng.random() < FREEZE_SHARE:
            blows.append(Blow(at_s=at_s, name=name, how=FREEZE, lasts_s=rng.uniform(*FREEZE_S)))
        else:
            blows.append(Blow(at_s=at_s, name=name, how=KILL))
        at_s += rng.uniform(*PAUSE_S)
    kills = int(seconds / broker_every_s - 1e-9) if broker_every_s else 0
    for number in range(1, kills + 1):
        away_s = broker_away_s if number == (kills + 1) // 2 else 0.0
        at_s = number * broker_every_s
        blows.append(Blow(at_s=at_s, name=BROKER, how=KILL, lasts_s=away_s))
    return sorted(blows, key=lambda blow: blow.at_s)


class Killer:
    """Deals blows to the processes of a stack, its broker among them."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._broker = Broker(stack.settings.broker, stack.folder / "broker")
        self._frozen: set[str] = set()
        self.dealt: Counter[tuple[str, str]] = Counter()  # by name and how
        self.missed = 0  # the process was down, or frozen

    async def follow(self, blows: Sequence[Blow]) -> None:
        """Deal them all, each at its time."""
        began_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for blow in blows:
                await asyncio.sleep(began_s + blow.at_s - asyncio.get_running_loop().time())
                group.create_task(self.deal(blow))

    async def deal(self, blow: Blow) -> None:
        """One blow; returns when a freeze is over, or a broker may come back."""
        if blow.name == BROKER:
            await self._kill_broker(blow.lasts_s)
        elif blow.name in self._frozen or not self._stack.processes[blow.name].pid:
            self.missed += 1
            return
        elif blow.how == FREEZE:
            await self._freeze(blow)
        else:
            await self._stack.kill(blow.name)
        self.dealt[blow.name, blow.how] += 1

    async def _freeze(self, blow: Blow) -> None:
        pid = self._stack.processes[blow.name].pid
        self._frozen.add(blow.name)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(blow.lasts_s)
        finally:
            self._frozen.discard(blow.name)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _kill_broker(self, away_s: float) -> None:
        """Kill it, and for so long again whenever the launcher brings it back."""
        end_s = asyncio.get_running_loop().time() + away_s
        while True:
            if pid := self._broker.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if asyncio.get_running_loop().time() >= end_s:
                return
            await asyncio.sleep(_POLL_S)
