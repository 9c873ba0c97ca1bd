"""Identifies processes by id and start time: an id alone may be reused.

The broker and the launcher write identities to files, and signal a process only if it still
matches. The module reads /proc, so it works on Linux only.
"""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

DRAIN_MAX_S = 60.0  # from SIGTERM until a process ends itself, whatever it waits for
GRACE_S = DRAIN_MAX_S + 5.0  # from SIGTERM to SIGKILL by a launcher
PRIVATE = 0o077  # umask of the processes that we start: no other user reads their files
_POLL_S = 0.05
# Fields of /proc/PID/stat, counted after the command in brackets.
_STATE_FIELD, _PARENT_FIELD, _GROUP_FIELD, _START_FIELD = 0, 1, 2, 19


@dataclass(frozen=True, slots=True)
class Identity:
    """A process: its id and its start time in clock ticks since boot."""

    pid: int
    started_ticks: int

    def is_alive(self) -> bool:
        """Return whether the same process still runs; a zombie does not count."""
        fields = _stat(self.pid)
        return (
            fields is not None
            and fields[_STATE_FIELD] not in "ZX"
            and int(fields[_START_FIELD]) == self.started_ticks
        )

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal if the process is alive; return False if it is not."""
        if not self.is_alive():
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        return True

    def stop(self, *, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace_s`; return when the process is gone."""
        self.signal(signal.SIGTERM)
        if not self.wait(grace_s):
            self.signal(signal.SIGKILL)
            self.wait(grace_s)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process is gone; return False if that takes longer than `timeout_s`."""
        end = time.monotonic() + timeout_s
        while self.is_alive():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
        return True


def identify(pid: int) -> Identity | None:
    """Return the identity of a running process, or None."""
    fields = _stat(pid)
    return None if fields is None else Identity(pid, int(fields[_START_FIELD]))


def this_process() -> Identity:
    """Return the identity of the calling process."""
    identity = identify(os.getpid())
    assert identity is not None, "it runs"
    return identity


def children(pid: int) -> dict[int, str]:
    """Return the living children of a process, with their command lines, by id."""
    return _living(_PARENT_FIELD, pid)


def members(group: int) -> dict[int, str]:
    """Return the living processes of a group and its leader, with their command lines, by id."""
    return _living(_GROUP_FIELD, group)


def _living(field: int, value: int) -> dict[int, str]:
    commands = {}
    for entry in Path("/proc").iterdir():
        fields = _stat(int(entry.name)) if entry.name.isdecimal() else None
        if fields and int(fields[field]) == value and fields[_STATE_FIELD] not in "ZX":
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_text().replace("\0", " ")
                commands[int(entry.name)] = words.strip()
    return commands


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # the process has ended, or is ending
        return None
    return text.rpartition(")")[2].split()
