"""Runs a process that imports modules once, and forks the programs that need them.

The launcher of a stack starts it first. While the server imports, clients wait. Once the server is
gone or frozen, programs are started without it. A client that dies during a request also ends the
server. `workers/forks.py` is the client side. The server ends with the thread that started it.
"""

import asyncio
import gc
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path

from infra.processes import tether
from infra.processes.identity import PRIVATE
from schemas.state_folder import private_folder
from workers import forks

_BACKLOG = 64
log = logging.getLogger(__name__)


class ForkServer:
    """A fork server: call `start`, then `wait_ready`, then `fork`, and finally `stop`."""

    def __init__(
        self,
        title: str,
        modules: Sequence[str],
        environ: Mapping[str, str],
        logs: Path,
        *,
        has_children: bool = False,
    ) -> None:
        """Do not start yet; with `has_children`, forked programs fork children of their own."""
        self.title, self._modules, self.environ = title, modules, dict(environ)
        self._has_children, self._answers = has_children, True
        self.log_file = logs / f"{title.lower()}-forks.log"
        self.pid = 0
        self.address = ""
        self._server: subprocess.Popen[bytes] | None = None
        self._imported = -1  # readable once the imports are done, or the server is gone

    def start(self) -> None:
        """Start the server process, which begins to import its modules."""
        folder = tempfile.mkdtemp(prefix="trivium-")  # for this user alone
        self.address = f"{folder}/forks"
        private_folder(self.log_file.parent)
        with socket.socket(socket.AF_UNIX) as listener, self.log_file.open("ab") as output:
            try:
                listener.bind(self.address)
            except OSError as error:  # socket paths are limited to about 100 characters
                log.warning("nothing is forked: %s: %s", self.address, error)
                shutil.rmtree(folder, ignore_errors=True)
                return
            listener.listen(_BACKLOG)
            self._imported, imported = os.pipe()
            descriptors = (listener.fileno(), imported)
            command = [sys.executable, "-m", __name__, *map(str, descriptors), *self._modules]
            self._server = subprocess.Popen(
                tether.tethered(*command),
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                umask=PRIVATE,
                pass_fds=descriptors,
            )
        os.close(imported)
        self.pid = self._server.pid

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the imports are done; return False if they fail or `timeout_s` is over."""
        if self._server is None:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                await readable(self._imported)
        except TimeoutError:
            log.warning("%s is not imported after %g s", self.title, timeout_s)
            return False
        return os.read(self._imported, 1) != b""

    def fork(
        self, command: Sequence[str], environ: Mapping[str, str], files: Sequence[int]
    ) -> forks.ForkedProcess | None:
        """Fork `python -m MODULE ...`, which leads a process group.

        `files` are its standard input, output and error, and optionally a listening socket, which
        is passed on as systemd does. Returns None if the server is gone or does not answer, or if
        Python or a library would have read other variables at its start.
        """
        diff = forks.read_early(environ).items() - self.environ.items()
        if diff or _read_by_python(environ) != _read_by_python(self.environ) or not self._answers:
            return None
        try:
            return forks.forked_command(
                self.address, command, environ, files, PRIVATE, has_children=self._has_children
            )
        except (OSError, EOFError) as error:
            self._answers = False
            log.warning("%s is not forked, nor what comes: %r", " ".join(command[1:4]), error)
            return None

    def stop(self) -> None:
        """End the server; the programs that it has forked continue."""
        server, self._server = self._server, None
        if server is not None:
            server.kill()
            server.wait()
            os.close(self._imported)
            shutil.rmtree(Path(self.address).parent, ignore_errors=True)


async def readable(descriptor: int) -> None:
    """Wait until the descriptor is readable; a pidfd becomes readable when its process ends."""
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(descriptor)


def _read_by_python(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Python reads when it starts."""
    return {name: value for name, value in environ.items() if name.startswith("PYTHON")}


def _leave(server_pid: int, number: int, _frame: object) -> None:
    """Remove the socket's folder on SIGTERM: a launcher that was killed cannot."""
    if os.getpid() == server_pid:
        shutil.rmtree(Path(forks.address).parent, ignore_errors=True)
    os._exit(128 + number)


def _without_file_3(*files: int) -> list[int]:
    """Return the same files with file 3 moved away, and open /dev/null as file 3.

    A forked program may get a listening socket there.
    """
    moved = [os.dup(file) if file == forks.LISTEN_FILE else file for file in files]
    nothing = os.open(os.devnull, os.O_RDONLY)
    if nothing != forks.LISTEN_FILE:
        os.dup2(nothing, forks.LISTEN_FILE, inheritable=False)
        os.close(nothing)
    return moved


def _serve(listener: int, imported: int, modules: Sequence[str]) -> None:
    listener, imported = _without_file_3(listener, imported)
    before = dict(os.environ)
    for name in modules:
        import_module(name)
    forks.imported_with.update(os.environ)
    forks.set_by_imports.update({*os.environ.items()} - {*before.items()})
    threads = [
        Path(f"/proc/self/task/{tid}/comm").read_text() for tid in os.listdir("/proc/self/task")
    ]
    if len(threads) > 1:  # a fork would inherit locks that no thread of it releases
        sys.exit(f"expected no threads after the imports, found {' '.join(threads)}")
    forks.entitle("trivium fork server")  # before a fork: it uses the room beside the environment
    gc.collect()
    gc.freeze()  # else a child's garbage collector writes to all objects, which copies their pages
    os.write(imported, b"1")
    os.close(imported)
    with socket.socket(fileno=os.dup(listener)) as server_socket:
        forks.address = server_socket.getsockname()
    signal.signal(signal.SIGTERM, partial(_leave, os.getpid()))
    endless, _sink = os.pipe()  # the protocol's liveness pipe, never closed: a tether ends us
    forkserver.main(listener, endless, [])


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
