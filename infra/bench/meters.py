"""Reads CPU time, wake-ups and memory of processes and of the machine from /proc. Linux only."""

import asyncio
import contextlib
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infra.stack.launcher import Stack

_EVERY_S = 0.5  # between two samples of memory
_MIB = 1 << 20
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM = 11, 12  # fields of /proc/PID/stat, counted after the command in brackets


def cpu_s(pid: int) -> float:
    """Return user and system time of all threads in s; 0 if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    fields = text.rpartition(")")[2].split()
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS_PER_S


def wakeups(pid: int) -> int:
    """Return how often live threads of the process have waited and resumed."""
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            lines = (line.split() for line in status.read_text().splitlines())
            count += sum(int(line[1]) for line in lines if line[0] == "voluntary_ctxt_switches:")
    return count


def machine_cpu_s() -> float:
    """Return the busy time of all cores since boot in s, of all processes and the kernel."""
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


class CpuMeter:
    """Measures the CPU time of named processes and of the machine since its construction."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._before = {name: cpu_s(pid) for name, pid in self._pids.items()}
        self._machine_before_s = machine_cpu_s()

    def used_s(self) -> dict[str, float]:
        """Return the CPU seconds of each process since the meter began."""
        return {name: cpu_s(pid) - self._before[name] for name, pid in self._pids.items()}

    def machine_s(self) -> float:
        """Return the CPU seconds of all cores since the meter began."""
        return machine_cpu_s() - self._machine_before_s


class MemorySampler:
    """Samples the memory of all processes of one kind, twice a second, until cancelled.

    A killed process restarts with little memory, so each sample is the largest of the kind.
    """

    def __init__(self, stack: "Stack", kind: str) -> None:
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
