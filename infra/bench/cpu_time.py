"""Reads CPU time and wake-ups of processes and of the machine from /proc. Linux only."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

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
