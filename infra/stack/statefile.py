"""Keeps two files in the state folder of a running stack: a lock, and `stack.json`.

The launcher's process holds the lock, and the kernel frees it however that process ends. From the
file, `trivium status`, `chat` and `down` read the addresses and states of the processes.
"""

import contextlib
import fcntl
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from infra.processes.identity import Identity, this_process
from schemas.errors import ConfigError
from schemas.state_folder import home, private_folder

STATE_FILE = "stack.json"
LOCK_FILE = "stack.lock"
START_FILE = "start.json"
NO_BROKER = "no broker"  # the process runs, and waits for the log


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRow:
    """A process as tables and `stack.json` show it."""

    name: str
    kind: str
    pid: int
    state: (
        str  # waiting, starting, ready, failing, no broker, draining, restarting, failed, stopped
    )
    restarts: int
    url: str
    log_file: str
    model: str = ""  # of a worker, if there are several


@dataclass(frozen=True, slots=True, kw_only=True)
class StackState:
    """The content of `stack.json`, which other commands read."""

    launcher: Identity = field(default_factory=this_process)
    bootstrap: str
    ready: bool
    gateways: list[str]
    processes: list[ProcessRow]
    waits_for: str = ""  # what delays the start
    models: list[str] = field(default_factory=list)  # names in the API


def read_state(folder: Path | None = None) -> StackState | None:
    """Return the state of the stack that runs in the folder, or None."""
    try:
        content = json.loads(((folder or home()) / STATE_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None
    launcher = Identity(**content.pop("launcher"))
    rows = [ProcessRow(**row) for row in content.pop("processes")]
    return StackState(launcher=launcher, processes=rows, **content) if launcher.is_alive() else None


class StackFiles:
    """The launcher's files in the state folder: it locks the folder, updates `stack.json` and
    removes it at the end.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: IO[str] | None = None
        self._last_text = ""

    def lock(self) -> None:
        """Lock the folder. Raises ConfigError if another stack has locked it."""
        private_folder(self._folder)
        lock = (self._folder / LOCK_FILE).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(
                f"a stack runs already in {self._folder}; stop it with `trivium down`, or set "
                "TRIVIUM_HOME to another folder"
            ) from None
        self._lock = lock

    def usual_s(self, kind: str) -> float | None:
        """Return how long a stack of this kind last took to start in this folder, in seconds."""
        try:
            return float(json.loads((self._folder / START_FILE).read_text())[kind])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def record_start(self, kind: str, start_s: float) -> None:
        """Record how long this start took, and drop other kinds; a full disk fails no start."""
        with contextlib.suppress(OSError):
            (self._folder / START_FILE).write_text(json.dumps({kind: round(start_s, 1)}))

    def write(self, state: StackState) -> None:
        """Write `stack.json` if its content changed."""
        text = json.dumps(asdict(state), indent=2)
        if text == self._last_text:
            return
        draft = self._folder / f"{STATE_FILE}.new"
        draft.write_text(text)
        draft.replace(self._folder / STATE_FILE)
        self._last_text = text

    def release(self) -> None:
        """Remove `stack.json` and unlock the folder, if this launcher had locked it."""
        if self._lock is not None:
            (self._folder / STATE_FILE).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
