"""Runs a temporary PostgreSQL server for a demo and for tests; its folder is deleted at the end.

The server is Debian's package, or one unpacked into `build/postgres`. It refuses to run as root, so
root runs it as another user.
"""

import asyncio
import logging
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from infra.broker.probe import free_ports
from infra.processes.supervisor import ProcessSpec, Supervisor
from schemas.errors import ConfigError, NotReady

log = logging.getLogger("trivium.platform")
_UNPACKED = Path(__file__).parents[2] / "build" / "postgres"
_PLACES = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin")
_HOST, SUPERUSER, DATABASE = "127.0.0.1", "postgres", "app"
_NAME = "postgres"
_FIELD_END, _ROW_END = "\x1f", "\x1e"  # separators in psql's output
_START_S, _STOP_S, _POLL_S = 60.0, 20.0, 0.05
_SETTINGS = {
    "listen_addresses": _HOST,
    "wal_level": "logical",
    "max_replication_slots": "8",
    "max_wal_senders": "8",
    "max_slot_wal_keep_size": "256MB",  # WAL that a slot without a reader may retain
}


def binaries(*roots: Path) -> Path:
    """Return the folder of the newest server's programs; raises ConfigError where there is none."""
    for root in roots or (_UNPACKED, Path("/")):
        folders = [folder for place in _PLACES for folder in root.glob(place)]
        servers = [folder for folder in folders if (folder / "postgres").exists()]
        if servers:
            return max(servers, key=_version)
    raise ConfigError(
        "PostgreSQL: expected its server in /usr/lib/postgresql/*/bin, found none; install it "
        "(Debian: apt-get install postgresql), or unpack it without root: `make postgres`"
    )


def _version(folder: Path) -> int:
    digits = "".join(filter(str.isdigit, folder.parent.name))
    return int(digits or 0)


class Postgres:
    """A new, empty server with the database `app`: `async with Postgres() as database`."""

    def __init__(self) -> None:
        self._bin = binaries()
        (self.port,) = free_ports(_HOST)
        self.host = _HOST
        self.folder = Path()
        self._supervisor = Supervisor()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="trivium-postgres-"))
        if os.geteuid() == 0:
            os.chown(self.folder, *_user())
        data = self.folder / "data"
        init = ("initdb", "-D", str(data), "-U", SUPERUSER, "--auth=trust", "--encoding=UTF8")
        await self._run(*init, "--locale=C.UTF-8", "--no-sync")
        flags = {"port": str(self.port), "unix_socket_directories": str(self.folder), **_SETTINGS}
        server = ["-D", str(data), *(f"--{name}={value}" for name, value in flags.items())]
        self._supervisor.start(
            ProcessSpec(
                name=_NAME,
                command=(*_as_server_user(), str(self._bin / "postgres"), *server),
                log_file=self.folder / "server.log",
                env=self._environ(),
                restart=False,
            )
        )
        await self._until_it_answers()
        await self.sql(f"CREATE DATABASE {DATABASE}", database="postgres")

    async def _until_it_answers(self) -> None:
        process = self._supervisor.processes[_NAME]
        try:
            async with asyncio.timeout(_START_S):
                while await self._status("pg_isready", *self._address()):
                    if process.failed:
                        raise NotReady(f"PostgreSQL ended at its start:\n{process.tail()}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise NotReady(
                f"PostgreSQL did not answer within {_START_S:g} s:\n{process.tail()}"
            ) from None

    async def stop(self) -> None:
        """Stop the server, even with connected clients, and delete its folder."""
        for process in self._supervisor.processes.values():
            process.kill(signal.SIGINT)  # SIGTERM would wait for its clients
        await self._supervisor.stop(grace_s=_STOP_S)
        if self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)

    async def sql(self, text: str, *, database: str = DATABASE) -> list[list[str]]:
        """Run statements, each in its own transaction; return the rows, as texts, of the only
        query.

        Raises ConfigError with the server's message.
        """
        command = (str(self._bin / "psql"), *self._address(), "-U", SUPERUSER, "-d", database)
        options = (
            "-X",
            "-q",
            "-A",
            "-t",
            "-F",
            _FIELD_END,
            "-R",
            _ROW_END,
            "-v",
            "ON_ERROR_STOP=1",
        )
        process = await asyncio.create_subprocess_exec(
            *command,
            *options,
            env=self._environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        output, errors = await process.communicate(text.encode())
        if process.returncode:
            raise ConfigError(f"PostgreSQL: {errors.decode().strip()} in {text[:200]!r}")
        rows = output.decode().removesuffix("\n").split(_ROW_END)
        return [row.split(_FIELD_END) for row in rows if row]

    def _address(self) -> tuple[str, ...]:
        return ("-h", _HOST, "-p", str(self.port))

    def _environ(self) -> dict[str, str]:
        """Return the environment, with the path of libraries unpacked with the programs."""
        libraries = [str(path.parent) for path in _UNPACKED.glob("usr/lib/*/libpq.so.5")]
        variables = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        return {**variables, "LC_ALL": "C.UTF-8", "LD_LIBRARY_PATH": ":".join(libraries)}

    async def _status(self, program: str, *arguments: str) -> int:
        process = await asyncio.create_subprocess_exec(
            str(self._bin / program),
            *arguments,
            env=self._environ(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return await process.wait()

    async def _run(self, program: str, *arguments: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *_as_server_user(),
            str(self._bin / program),
            *arguments,
            cwd=self.folder,
            env=self._environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        if process.returncode:
            raise ConfigError(f"{program}: {output.decode(errors='replace')[-2_000:]}")


def _user() -> tuple[int, int]:
    """Return the user and group that the server runs as if we are root."""
    for name in (SUPERUSER, "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return entry.pw_uid, entry.pw_gid
    raise ConfigError("PostgreSQL: expected a user postgres or nobody to run it, found neither")


def _as_server_user() -> Sequence[str]:
    """Return the beginning of a server command that changes the user.

    The kernel clears the parent-death signal at a change of user, so `setpriv` sets it again.
    """
    if os.geteuid() != 0:
        return ()
    uid, gid = _user()
    ids = (f"--reuid={uid}", f"--regid={gid}", "--clear-groups")
    return ("setpriv", *ids, "--pdeathsig=INT", "--")
