"""Asks a fork server for processes: it has imported, once, what all of them need.

Theory of operation. `infra/processes/fork_server.py` runs one process per stack that imports vLLM
and then does nothing but fork, by the protocol of `multiprocessing.forkserver`. Who is forked there
asks the same server for its own children, so that an engine's three processes import nothing. They
begin with the server's memory, and take over all else from whoever asked: environment, folder,
output and process group. Only what libraries read while they were imported stays as the server had
it. Where a child needs that otherwise, or the server is gone, it is spawned as ever.
"""

import atexit
import contextlib
import logging
import os
import runpy
import shlex
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from io import BytesIO
from multiprocessing import context, forkserver, popen_forkserver, process, spawn, util
from multiprocessing import resource_tracker as trackers
from multiprocessing.connection import wait
from multiprocessing.reduction import dump, sendfds
from typing import Any

address = ""  # of the server that this process was forked by
imported_with: dict[str, str] = {}  # the server's environment after its imports; empty elsewhere
set_by_imports: dict[str, str] = {}  # what they have changed in it
ANSWER_S = 10.0  # for a fork; a server that is frozen gives none
_OWN_GROUP, _OWN_SESSION = 0, -1
LISTEN_FILE = 3  # of a listening socket that is passed on; nothing else in a server has it
_UNKNOWN_EXIT = 255  # of a child that outlived its server
# What libraries read while they are loaded or imported, by the beginnings of its names ...
_READ_EARLY = tuple(
    "LD_PRELOAD OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ NUMEXPR_ TORCH PYTORCH_ VLLM_".split()
)
# ... but for what vLLM reads later. The last one is heeded here (`begin`).
_READ_LATE = {
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_HOST_IP",
    "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "VLLM_RPC_BASE_PATH",
    "VLLM_SSM_CONV_STATE_LAYOUT",
    _AFFINITY := "GOMP_CPU_AFFINITY",
}
log = logging.getLogger(__name__)


def read_early(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that libraries have read before a fork begins."""
    is_bound_here = environ.get("OMP_NUM_THREADS") == "1" and _cores(environ) is not None
    late = _READ_LATE if is_bound_here else _READ_LATE - {_AFFINITY}
    names = [name for name in environ if name.startswith(_READ_EARLY) and name not in late]
    return {name: environ[name] for name in names}


def _cores(environ: Mapping[str, str]) -> list[int] | None:
    """Return the cores that a lone thread is bound to; None if they are not listed singly."""
    words = environ.get(_AFFINITY, "").split()
    return [int(word) for word in words] if all(word.isdecimal() for word in words) else None


def differences(environ: Mapping[str, str]) -> list[str]:
    """Return the variables that were read here with other values than in this environment."""
    server_vars, child_vars = read_early(imported_with), read_early(environ)
    return sorted({name for name, _ in server_vars.items() ^ child_vars.items()})


class ForkProcess(process.BaseProcess):
    """A child of a process that was forked."""

    _start_method = "spawn"

    @staticmethod
    def _Popen(child: Any) -> Any:
        if conflicts := differences(os.environ):
            log.warning("%s is not forked, but spawned: other %s", child.name, ", ".join(conflicts))
        else:
            try:
                return Popen(child)
            except (OSError, EOFError) as error:
                log.warning("%s is spawned: the fork server is gone (%r)", child.name, error)
        return context.SpawnProcess._Popen(child)  # noqa: SLF001  # what would run without us

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        try:
            return super()._bootstrap(parent_sentinel)  # type: ignore[misc,no-any-return]
        finally:
            atexit._run_exitfuncs()  # noqa: SLF001  # which a spawned one does, and a fork does not


class ForkContext(context.SpawnContext):
    """What starts such children; locks and queues are those of spawned ones."""

    Process = ForkProcess  # type: ignore[assignment]


class Popen(popen_forkserver.Popen):
    """A running child. It may outlive the server, whose pipes then say nothing of it."""

    def __init__(self, child: Any) -> None:
        self._files: list[int] = []  # that it inherits
        super().__init__(child)

    def duplicate_for_child(self, fd: int) -> int:
        self._files.append(fd)
        return len(self._files) - 1

    def _launch(self, child: Any) -> None:
        about = spawn.get_preparation_data(child.name)
        for name in ("init_main_from_name", "init_main_from_path"):
            about.pop(name, None)  # what children run is never in the program itself
        files = {number: self.duplicate_for_child(number) for number in (1, 2)}
        begin = Beginning({**about, "start_method": "spawn"}, dict(os.environ), files, os.getpgrp())
        context.set_spawning_popen(self)
        try:
            message = _pickle_items(begin, child)
        finally:
            context.set_spawning_popen(None)
        tracker = trackers.getfd()
        assert tracker is not None, "asking for it starts it"
        self._forked = ForkedProcess(address, message, self._files, tracker)
        self.pid, self.sentinel = self._forked.pid, self._forked.end_fd
        self.finalizer = util.Finalize(self, self._forked.close)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and wait([self.sentinel], 0 if flag else None):
            self.returncode = self._forked.exit_code()  # others may wait for `sentinel` yet
        return self.returncode


class ForkedProcess:
    """A process that a server forked for this one; raises OSError or EOFError where it does not."""

    def __init__(
        self, server_address: str, message: bytes, files: Sequence[int], tracker: int
    ) -> None:
        self.status, status = os.pipe()
        data, self._alive = os.pipe()  # its end tells the child that this process is gone
        self.end_fd = -1  # becomes readable; a pidfd, unless it had ended before it was known
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.connect(server_address)
                sendfds(server, [data, status, data, tracker, *files])
            os.close(status)
            status = -1
            if not wait([self.status], ANSWER_S):
                raise TimeoutError(f"no answer in {ANSWER_S:g} s")
            self.pid = forkserver.read_signed(self.status)
            self.end_fd = _end_of(self.pid, self.status)
            with open(os.dup(self._alive), "wb") as child:
                child.write(message)
        except BaseException:
            self.close()
            raise
        finally:
            for end in (data, status):
                if end >= 0:
                    os.close(end)

    def exit_code(self, patience_s: float = ANSWER_S) -> int:
        """Once it has ended; minus the signal that ended it. To be asked once."""
        wait([self.end_fd])
        try:
            if not wait([self.status], patience_s):
                return _UNKNOWN_EXIT
            return int(forkserver.read_signed(self.status))
        except (OSError, EOFError):
            return _UNKNOWN_EXIT

    def wait(self, patience_s: float = ANSWER_S) -> int:
        """Wait for the exit code, then close the process's files."""
        try:
            return self.exit_code(patience_s)
        finally:
            self.close()

    def close(self) -> None:
        """Close the process's files; a forked command ends with that."""
        for end in (self.status, self._alive, self.end_fd):
            if end >= 0:
                os.close(end)
        self.status = self._alive = self.end_fd = -1


def _end_of(pid: int, status: int) -> int:
    """What becomes readable when a process ends; it may have ended and be forgotten."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return os.dup(status)


def forked_command(
    server_address: str,
    command: Sequence[str],
    environ: Mapping[str, str],
    files: Sequence[int],
    umask: int,
    *,
    has_children: bool,
) -> ForkedProcess:
    """`python -m MODULE ...`, forked, with these three files, and a listening socket as the fourth,
    if there is one; it leads a process group, and a session where it asks the server for no
    children, which could not join its group there.
    """
    assert command[1] == "-m", f"expected a module, found {command}"
    about = {"dir": os.getcwd(), "sys_argv": [*command[2:]]}
    group = _OWN_GROUP if has_children else _OWN_SESSION
    numbers = {number: number for number in range(len(files))}  # the fourth is `LISTEN_FILE`
    begin = Beginning(about, dict(environ), numbers, group)
    return ForkedProcess(server_address, _pickle_items(begin, Command(umask)), files, files[0])


class Beginning:
    """What a fork does first of all; pickled before anything of its own."""

    def __init__(
        self, about: dict[str, Any], environ: dict[str, str], files: dict[int, int], group: int
    ) -> None:
        self._what = (about, environ, files, group)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return begin, self._what


def begin(
    about: dict[str, Any], environ: dict[str, str], files: dict[int, int], group: int
) -> dict[str, Any]:
    """Become what was asked for, in this process group."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which the server handles
    os.environ.clear()
    os.environ.update({**set_by_imports, **environ})
    if group == _OWN_SESSION:
        os.setsid()
    else:
        os.setpgid(0, group)
    inherited = forkserver.get_inherited_fds() or []
    for number, place in files.items():
        os.dup2(inherited[place], number)
        os.close(inherited[place])
    if 0 in files:  # the server has put something else in its place
        sys.stdin = open(0, closefd=False)  # as long as the process
    if group > 0 and (cores := _cores(environ)):  # as the library of threads would, once loaded
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)
    return about


class Command:
    """A program that was forked; it is asked to end when its starter is gone, as by a tether."""

    def __init__(self, umask: int) -> None:
        self._umask = umask

    def _bootstrap(self, parent_sentinel: int) -> int:
        os.umask(self._umask)
        if "LISTEN_FDS" in os.environ:
            os.environ["LISTEN_PID"] = str(os.getpid())
        entitle(shlex.join([sys.executable, "-m", *sys.argv]))
        trackers._resource_tracker._fd = None  # type: ignore[attr-defined]  # noqa: SLF001  # its own, when it needs one
        threading.Thread(target=_end_with, args=(parent_sentinel,), daemon=True).start()
        try:
            return _run(sys.argv[0])
        finally:
            threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # as Python does at its end
            atexit._run_exitfuncs()  # noqa: SLF001  # likewise
            sys.stdout.flush()
            sys.stderr.flush()


def entitle(words: str) -> None:
    """Show this in lists of processes, by the package that vLLM brings for it."""
    with contextlib.suppress(ImportError):
        import_module("setproctitle").setproctitle(words)


def _run(module: str) -> int:
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end_with(parent: int) -> None:
    wait([parent])
    os.kill(os.getpid(), signal.SIGTERM)


def _pickle_items(*items: object) -> bytes:
    buffer = BytesIO()
    for item in items:
        dump(item, buffer)
    return buffer.getvalue()
