"""Samples the resident memory of all processes of one kind, twice a second.

A killed process restarts with little memory, so each sample is the largest of the kind.
"""

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path

from infra.stack.launcher import Stack

_EVERY_S = 0.5
_MIB = 1 << 20


class MemorySampler:
    """Samples the memory of processes of one kind until cancelled."""

    def __init__(self, stack: Stack, kind: str) -> None:
        self._stack, self._kind = stack, kind
        self.samples_mib: list[float] = []

    async def run(self) -> None:
        """Take a sample twice a second until cancelled."""
        while True:
            sizes_mib = [
                resident_mib(process.pid)
                for name, process in self._stack.processes.items()
                if name.partition("-")[0] == self._kind and process.pid
            ]
            if any(sizes_mib):
                self.samples_mib.append(max(sizes_mib))
            await asyncio.sleep(_EVERY_S)


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process; 0 if it has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    lines = (line.split() for line in status.splitlines() if line.startswith("VmRSS:"))
    return next((int(line[1]) * 1024 / _MIB for line in lines), 0.0)


def growth(samples: Sequence[float], share: float = 1 / 3) -> float | None:
    """Return the median of the last samples over that of the first; None with too few samples."""
    count = int(len(samples) * share + 1e-9)
    if not count:
        return None
    return statistics.median(samples[-count:]) / statistics.median(samples[:count])
