"""Starts processes through a fork server, which has imported the modules that they need.

Theory of operation. `infra/processes/fork_server.py` runs one process per stack that imports vLLM
and then only forks, by the protocol of `multiprocessing.forkserver`. A forked process requests its
own children from the same server, so that an engine's three processes import nothing. A child
begins with the server's memory. Environment, folder, output and process group are those of the
process that requested it. Only variables that libraries read while they were imported keep the
server's values. If a child needs other values, or the server is gone, the child is spawned.
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

address = ""  # of the server that forked this process
imported_with: dict[str, str] = {}  # the server's environment after its imports; empty elsewhere
set_by_imports: dict[str, str] = {}  # variables that the imports have set or changed
ANSWER_S = 10.0  # timeout of a fork request; a frozen server does not answer
_OWN_GROUP, _OWN_SESSION = 0, -1
LISTEN_FILE = 3  # file number of a listening socket that is passed on; no other file has it
_UNKNOWN_EXIT = 255  # exit code of a child that outlived its server
# Prefixes of variables that libraries read while they are loaded or imported ...
_READ_EARLY = tuple(
    "LD_PRELOAD OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ NUMEXPR_ TORCH PYTORCH_ VLLM_".split()
)
# ... except those that vLLM reads later. `begin` applies the last one.
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
    """Return the variables that libraries read before a fork begins."""
    is_bound_here = environ.get("OMP_NUM_THREADS") == "1" and _cores(environ) is not None
    late = _READ_LATE if is_bound_here else _READ_LATE - {_AFFINITY}
    names = [name for name in environ if name.startswith(_READ_EARLY) and name not in late]
    return {name: environ[name] for name in names}


def _cores(environ: Mapping[str, str]) -> list[int] | None:
    """Return the cores that a lone thread is bound to; None if they are not listed singly."""
    words = environ.get(_AFFINITY, "").split()
    return [int(word) for word in words] if all(word.isdecimal() for word in words) else None


def differences(environ: Mapping[str, str]) -> list[str]:
    """Return the names of variables that the server's libraries read with other values."""
    server_vars, child_vars = read_early(imported_with), read_early(environ)
    return sorted({name for name, _ in server_vars.items() ^ child_vars.items()})


class ForkProcess(process.BaseProcess):
    """A child of a forked process; forked by the same server, or spawned."""

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
        return context.SpawnProcess._Popen(child)  # noqa: SLF001  # what the base class would run

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        try:
            return super()._bootstrap(parent_sentinel)  # type: ignore[misc,no-any-return]
        finally:
            atexit._run_exitfuncs()  # noqa: SLF001  # spawned processes run them, forks do not


class ForkContext(context.SpawnContext):
    """A context that starts a `ForkProcess`; locks and queues are those of spawned processes."""

    Process = ForkProcess  # type: ignore[assignment]


class Popen(popen_forkserver.Popen):
    """A running child. It may outlive the server, whose pipes then do not report its exit."""

    def __init__(self, child: Any) -> None:
        self._files: list[int] = []  # descriptors that the child inherits
        super().__init__(child)

    def duplicate_for_child(self, fd: int) -> int:
        self._files.append(fd)
        return len(self._files) - 1

    def _launch(self, child: Any) -> None:
        about = spawn.get_preparation_data(child.name)
        for name in ("init_main_from_name", "init_main_from_path"):
            about.pop(name, None)  # the functions that children run are not in the main module
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
            self.returncode = self._forked.exit_code()  # no close: others may wait for `sentinel`
        return self.returncode


class ForkedProcess:
    """A process that a server forks for this one; raises OSError or EOFError if that fails."""

    def __init__(
        self, server_address: str, message: bytes, files: Sequence[int], tracker: int
    ) -> None:
        self.status, status = os.pipe()
        data, self._alive = os.pipe()  # the child reads its end when this process is gone
        self.end_fd = -1  # readable when the child has ended; see `_end_of`
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
        """Wait until the process ends, and return its exit code; call it only once.

        A signal gives its negative number, a lost server `_UNKNOWN_EXIT`.
        """
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
        """Close the pipes to the process; a forked command then ends."""
        for end in (self.status, self._alive, self.end_fd):
            if end >= 0:
                os.close(end)
        self.status = self._alive = self.end_fd = -1


def _end_of(pid: int, status: int) -> int:
    """Return a descriptor that is readable when a process ends; the status pipe if it is gone."""
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
    """Fork `python -m MODULE ...` with three standard files, and optionally a listening socket.

    The process leads a process group. Without `has_children` it also leads a session, which its
    own forked children could not join.
    """
    assert command[1] == "-m", f"expected a module, found {command}"
    about = {"dir": os.getcwd(), "sys_argv": [*command[2:]]}
    group = _OWN_GROUP if has_children else _OWN_SESSION
    numbers = {number: number for number in range(len(files))}  # the fourth is `LISTEN_FILE`
    begin = Beginning(about, dict(environ), numbers, group)
    return ForkedProcess(server_address, _pickle_items(begin, Command(umask)), files, files[0])


class Beginning:
    """The call of `begin` in the forked process; pickled in front of the child itself."""

    def __init__(
        self, about: dict[str, Any], environ: dict[str, str], files: dict[int, int], group: int
    ) -> None:
        self._what = (about, environ, files, group)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return begin, self._what


def begin(
    about: dict[str, Any], environ: dict[str, str], files: dict[int, int], group: int
) -> dict[str, Any]:
    """Set environment, process group, files and cores of this process; return `about`."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server has its own handler
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
    if 0 in files:  # the server has replaced `sys.stdin`
        sys.stdin = open(0, closefd=False)  # stays open as long as the process runs
    if group > 0 and (cores := _cores(environ)):  # the thread library does it only when loaded
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)
    return about


class Command:
    """A forked program; it gets SIGTERM when the process that started it is gone."""

    def __init__(self, umask: int) -> None:
        self._umask = umask

    def _bootstrap(self, parent_sentinel: int) -> int:
        os.umask(self._umask)
        if "LISTEN_FDS" in os.environ:
            os.environ["LISTEN_PID"] = str(os.getpid())
        entitle(shlex.join([sys.executable, "-m", *sys.argv]))
        # This process starts a resource tracker of its own if it needs one.
        trackers._resource_tracker._fd = None  # type: ignore[attr-defined]  # noqa: SLF001  # unset
        threading.Thread(target=_end_with, args=(parent_sentinel,), daemon=True).start()
        try:
            return _run(sys.argv[0])
        finally:
            threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # as at exit
            atexit._run_exitfuncs()  # noqa: SLF001  # Python does both at exit
            sys.stdout.flush()
            sys.stderr.flush()


def entitle(words: str) -> None:
    """Set this process's title, if the package setproctitle is installed, as it is with vLLM."""
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
