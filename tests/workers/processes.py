"""What tests of engines look up about processes: their families, and the CPU time these use."""

import multiprocessing.connection
import os
from pathlib import Path


def family(pid: int) -> list[int]:
    """A process and all that descend from it, parents first."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    threads = [
        child
        for task in Path(f"/proc/{pid}/task").iterdir()
        if task.name != str(pid)
        for child in (task / "children").read_text().split()
    ]
    found = [pid]
    for child in (*children, *threads):
        found += family(int(child))
    return found


def lives(pid: int) -> bool:
    """Whether it runs, and is no corpse that waits for its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def cpu_s(pids: list[int]) -> float:
    """CPU time of all of them since they began."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def quiet_s(pids: list[int]) -> None:
    """Wait until the engines have settled after the last test."""
    before = cpu_s(pids)
    for _ in range(20):
        multiprocessing.connection.wait([], timeout=0.25)
        now = cpu_s(pids)
        if now - before < 0.03:
            return
        before = now
