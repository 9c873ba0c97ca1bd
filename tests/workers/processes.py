"""What tests of engines look up about processes: families, priorities, CPU time."""

import contextlib
import multiprocessing.connection
import os
import time
from pathlib import Path

from infra.processes.identity import members


def family(pid: int) -> list[int]:
    """A process and all that descend from it, parents first; of one that is gone, itself.

    And all of the group that it leads, in the order of their ids: an engine's may be forked by
    another process.
    """
    tasks = Path(f"/proc/{pid}/task")
    main = tasks / str(pid)
    try:
        threads = [task for task in tasks.iterdir() if task != main]
    except FileNotFoundError:
        threads = []
    found = [pid]
    for task in (main, *threads):
        for child in _read(task / "children").split():
            found += family(int(child))
    return [*found, *sorted(members(pid).keys() - {*found})]


def lives(pid: int) -> bool:
    """Whether it runs, and is no corpse that waits for its parent."""
    state = _fields(pid)[:1]
    return state != [] and state[0] not in "ZX"


def parent(pid: int) -> int:
    """Who started it, or has taken it over."""
    return int(_fields(pid)[1])


def stands_still(pid: int) -> bool:
    """Whether all of its threads have stopped: one that has not yet may still do something."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(_read(task).rpartition(")")[2].split()[:1] == ["T"] for task in tasks)


def niceness(pid: int) -> set[int]:
    """Of all of its threads."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            found.add(os.getpriority(os.PRIO_PROCESS, int(task.name)))
    return found


def cpu_s(pids: list[int]) -> float:
    """CPU time since they began of all that are there."""
    ticks = sum(int(field) for pid in pids for field in _fields(pid)[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def cores_used(pids: list[int], seconds: float) -> float:
    """How many cores all of them keep busy for as long as this takes: so many seconds, or more."""
    before_s, began_s = cpu_s(pids), time.monotonic()
    multiprocessing.connection.wait([], timeout=seconds)
    return (cpu_s(pids) - before_s) / (time.monotonic() - began_s)


def _fields(pid: int) -> list[str]:
    """The process's state and what follows it in its `stat`; nothing of one that is gone."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _read(path: Path) -> str:
    """What the kernel says; "" of a process or thread that ends meanwhile."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
