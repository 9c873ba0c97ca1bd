"""What a running stack leaves in its state folder: a lock, and `stack.json` for other commands.

The lock is held by the launcher's process and goes with it, however it ends; the file tells
`trivium status`, `chat` and `down` where things are.
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
NO_BROKER = "no broker"  # a process that lives, and waits for the log


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StackState:
    """The content of `stack.json`, which other commands read."""

    launcher: Identity = field(default_factory=this_process)
    bootstrap: str
    ready: bool
    gateways: list[str]
    processes: list[ProcessRow]
    waits_for: str = ""  # what holds up a start


def read_state(folder: Path | None = None) -> StackState | None:
    """The stack that runs in the folder, or None."""
    try:
        content = json.loads(((folder or home()) / STATE_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None
    launcher = Identity(**content.pop("launcher"))
    rows = [ProcessRow(**row) for row in content.pop("processes")]
    return StackState(launcher=launcher, processes=rows, **content) if launcher.is_alive() else None


class StackFiles:
    """The launcher's side: takes the lock, keeps the file true, removes it at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: IO[str] | None = None
        self._last_text = ""

    def lock(self) -> None:
        """Take the folder; raises ConfigError if another stack has it."""
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
        """How long the last start of such a stack took in this folder."""
        try:
            return float(json.loads((self._folder / START_FILE).read_text())[kind])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def record_start(self, kind: str, start_s: float) -> None:
        """Remember it, and nothing of other stacks; a disk that is full fails no start."""
        with contextlib.suppress(OSError):
            (self._folder / START_FILE).write_text(json.dumps({kind: round(start_s, 1)}))

    def write(self, state: StackState) -> None:
        """Write the file anew if anything in it changed."""
        text = json.dumps(asdict(state), indent=2)
        if text == self._last_text:
            return
        draft = self._folder / f"{STATE_FILE}.new"
        draft.write_text(text)
        draft.replace(self._folder / STATE_FILE)
        self._last_text = text

    def release(self) -> None:
        """Remove the file and give the folder up; nothing if it was not ours."""
        if self._lock is not None:
            (self._folder / STATE_FILE).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
