"""What tests of engines look up about processes: families, priorities, CPU time."""

import contextlib
import multiprocessing.connection
import os
import time
from pathlib import Path

from infra.processes.identity import members


def family(pid: int) -> list[int]:
    """Return the pids of a process, its descendants and its group, parents first."""
    tasks = Path(f"/proc/{pid}/task")
    main = tasks / str(pid)
    try:
        threads = [task for task in tasks.iterdir() if task != main]
    except FileNotFoundError:
        threads = []
    pids = [pid]
    for task in (main, *threads):
        for child in _read(task / "children").split():
            pids += family(int(child))
    return [*pids, *sorted(members(pid).keys() - {*pids})]


def lives(pid: int) -> bool:
    """Return whether the process runs and is no zombie."""
    state = _fields(pid)[:1]
    return state != [] and state[0] not in "ZX"


def parent(pid: int) -> int:
    """Return the pid of the parent."""
    return int(_fields(pid)[1])


def stands_still(pid: int) -> bool:
    """Return whether all threads of the process are stopped."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(_read(task).rpartition(")")[2].split()[:1] == ["T"] for task in tasks)


def niceness(pid: int) -> set[int]:
    """Return the niceness of all threads of the process."""
    priorities = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            priorities.add(os.getpriority(os.PRIO_PROCESS, int(task.name)))
    return priorities


def cpu_s(pids: list[int]) -> float:
    """Return the CPU time of all these processes since they started."""
    ticks = sum(int(field) for pid in pids for field in _fields(pid)[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def cores_used(pids: list[int], seconds: float) -> float:
    """Return how many cores the processes keep busy over at least this time."""
    before_s, began_s = cpu_s(pids), time.monotonic()
    multiprocessing.connection.wait([], timeout=seconds)
    return (cpu_s(pids) - before_s) / (time.monotonic() - began_s)


def _fields(pid: int) -> list[str]:
    """Return the fields of `stat` from the state on; none for a process that ended."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _read(path: Path) -> str:
    """Return a file's text; "" for a process or thread that ended meanwhile."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
