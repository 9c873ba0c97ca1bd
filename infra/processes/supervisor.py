"""Keeps child processes running: starts them, restarts them when they die, stops them.

Their output goes to log files. The module depends neither on Kafka nor on what the processes do;
`infra/stack/launcher.py` decides which run, and when they are ready. Each child leads a process
group, gets SIGTERM when the launcher dies, and its whole group ends with it. Call from the main
thread: a child ends with the thread that started it.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from infra.processes import tether
from infra.processes.fork_server import ForkServer, readable
from infra.processes.identity import GRACE_S, PRIVATE
from schemas.state_folder import private_folder
from workers.forks import ANSWER_S, ForkedProcess

BACKOFF_S, BACKOFF_MAX_S = 0.5, 10.0
STABLE_S = 30.0  # the backoff starts again after a run of this length
EXIT_BAD_CONFIG = 2  # restarting cannot help
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A command to keep running."""

    name: str
    command: tuple[str, ...]
    log_file: Path
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    restart: bool = True
    grace_s: float = GRACE_S  # between SIGTERM and SIGKILL
    forks: ForkServer | None = None  # forks it, while the server runs
    listener: socket.socket | None = None  # stays open over restarts (`LISTEN_FDS`)


class SupervisedProcess:
    """A spec and the process that runs it at present."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec  # used at the next start: it may be replaced
        self.pid = 0  # 0: not running
        self.restarts = 0
        self.exit_code: int | None = None  # of the last run
        self.failed = False  # not restarted any more
        self.has_served = False  # it was ready once, so later failures have an outside cause
        self.changed = asyncio.Event()  # set at every start and end
        self.stopping = False
        self._task: asyncio.Task[None] | None = None
        self._child: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._end = -1  # a pidfd, or a fork server's descriptor that is readable at the end
        self._log_start = 0  # where this supervisor's part of the log begins, in bytes

    @property
    def name(self) -> str:
        return self.spec.name

    def start(self) -> None:
        """Start the process and keep it running in the background."""
        self.stopping = False
        log = self.spec.log_file
        self._log_start = log.stat().st_size if log.exists() else 0
        self._spawn()
        self._task = asyncio.create_task(self._keep(), name=f"keep {self.name}")

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process; if it ends, the supervisor restarts it."""
        if self.pid:
            with contextlib.suppress(OSError):  # it has just ended
                signal.pidfd_send_signal(self._end, number)

    async def stop(self, *, grace_s: float | None = None) -> None:
        """Send SIGTERM, and SIGKILL after `grace_s`; return when the process and its group are
        gone.

        A stopped process (SIGSTOP) is continued first. May be called again meanwhile, with another
        grace.
        """
        was_stopping, self.stopping = self.stopping, True
        task = self._task
        if task is None:
            return
        if not was_stopping:  # a second signal would end it at once
            if not self.pid:  # waiting to be restarted
                task.cancel()
            self.kill(signal.SIGTERM)
        self._wake()
        await asyncio.wait([task], timeout=self.spec.grace_s if grace_s is None else grace_s)
        self.kill(signal.SIGKILL)
        await asyncio.wait([task])
        self._task = None

    def _wake(self) -> None:
        """Send SIGCONT to the group: a stopped process handles no other signal."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGCONT)

    def tail(self) -> str:
        """Return the last lines of the log, without what earlier processes wrote there."""
        try:
            written = self.spec.log_file.read_bytes()[self._log_start :]
        except FileNotFoundError:
            return ""
        return "\n".join(written.decode(errors="replace").splitlines()[-_TAIL_LINES:])

    async def _keep(self) -> None:
        backoff_s = BACKOFF_S
        while True:
            began_s = time.monotonic()
            await self._wait_for_exit()
            is_hopeless = self.exit_code == EXIT_BAD_CONFIG and not self.has_served
            gives_up = is_hopeless or not self.spec.restart
            if self.stopping or gives_up:
                self.failed = gives_up and not self.stopping
                if self.failed and self.spec.listener is not None:
                    self.spec.listener.close()  # no process will accept its connections
                self.changed.set()
                return
            lived_s = time.monotonic() - began_s
            if lived_s > STABLE_S:
                backoff_s = BACKOFF_S
            self.changed.set()
            await asyncio.sleep(pause_s(self.exit_code, lived_s, backoff_s))
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
            self.restarts += 1
            self._spawn()

    def _spawn(self) -> None:
        spec = self.spec
        private_folder(spec.log_file.parent)
        with spec.log_file.open("ab") as output, open(os.devnull, "rb") as nothing:
            files = nothing, output
            child = self._child = start_process(
                spec.command, spec.env, files, spec.forks, listener=spec.listener
            )
        self.pid = child.pid
        self._end = (
            os.dup(child.end_fd) if isinstance(child, ForkedProcess) else os.pidfd_open(child.pid)
        )
        self.changed.set()

    async def _wait_for_exit(self) -> None:
        child = self._child
        assert child is not None, "a life ends only after it began"
        try:
            await readable(self._end)
            group, self.pid = self.pid, 0
        finally:
            os.close(self._end)
        with contextlib.suppress(ProcessLookupError):  # before the wait: the id is not reused yet
            os.killpg(group, signal.SIGKILL)
        if isinstance(child, ForkedProcess):
            with contextlib.suppress(TimeoutError):  # the server reports the exit code, if it can
                async with asyncio.timeout(ANSWER_S):
                    await readable(child.status)
            self.exit_code = child.wait(0)
        else:
            self.exit_code = child.wait()


def pause_s(exit_code: int | None, lived_s: float, backoff_s: float) -> float:
    """Return how long to wait before a restart, in seconds.

    A process that ended with code 0 is restarted at once. If that happens repeatedly, without a
    long run between, it waits as after a failure.
    """
    return backoff_s if exit_code or backoff_s > BACKOFF_S else max(0.0, BACKOFF_S - lived_s)


def start_process(
    command: Sequence[str],
    environ: Mapping[str, str],
    files: tuple[IO[bytes], IO[bytes]],
    forks: ForkServer | None,
    *,
    listener: socket.socket | None = None,
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start a process that leads a group and ends with this thread; fork it if possible.

    It reads from the first of the files and writes to the second. It gets the listener as if
    systemd had passed it on (`streams/gateway/http/listener.py`).
    """
    stdin, output = (file.fileno() for file in files)
    listeners = [] if listener is None else [listener.fileno()]
    environ = {**environ, **dict.fromkeys(["LISTEN_FDS"][: len(listeners)], "1")}
    all_files = (stdin, output, output, *listeners)
    if forks is not None and (forked := forks.fork(command, environ, all_files)):
        return forked
    return subprocess.Popen(
        tether.tethered(*command, listener=listeners[0] if listeners else -1),
        env=environ,
        pass_fds=listeners,
        stdin=stdin,
        stdout=output,
        stderr=output,
        start_new_session=True,
        umask=PRIVATE,
    )


class Supervisor:
    """Starts, restarts and stops a set of processes, by name."""

    def __init__(self) -> None:
        self.processes: dict[str, SupervisedProcess] = {}

    def start(self, spec: ProcessSpec) -> SupervisedProcess:
        """Start a process and keep it running; raises ValueError if the name is taken."""
        if spec.name in self.processes:
            raise ValueError(f"{spec.name} runs already")
        process = self.processes[spec.name] = SupervisedProcess(spec)
        process.start()
        return process

    async def remove(self, names: list[str]) -> None:
        """Stop these processes together and remove them, so that their names can be used again."""
        await self.stop(names)
        for name in names:
            del self.processes[name]

    async def stop(self, names: list[str] | None = None, *, grace_s: float | None = None) -> None:
        """Stop these processes, or all, together."""
        chosen = [p for p in self.processes.values() if names is None or p.name in names]
        await asyncio.gather(*(process.stop(grace_s=grace_s) for process in chosen))
