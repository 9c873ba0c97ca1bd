"""Runs Kafka Connect as one JVM, a standalone worker, and configures it over its REST API.

Its jars come from Maven (`make connect`). It writes only into one folder.
"""

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Any, Self

import httpx

from infra.broker.probe import free_ports
from infra.platform.connect.connectors import Config
from infra.processes.supervisor import ProcessSpec, Supervisor
from schemas.errors import ConfigError, NotReady
from schemas.state_folder import private_folder

log = logging.getLogger("trivium.platform")
_JARS = Path(__file__).parents[3] / "build" / "connect"
_HOST = "127.0.0.1"
_NAME = "connect"
_START_S, _STOP_S, _POLL_S = 120.0, 20.0, 0.1
_CONVERTER = "org.apache.kafka.connect.json.JsonConverter"


class Connect:
    """Use `async with Connect(bootstrap, folder) as connect`, then `connect.run(name, config)`."""

    def __init__(self, bootstrap: str, folder: Path) -> None:
        if not (_JARS / "libs").is_dir() or shutil.which("java") is None:
            raise ConfigError(
                f"Kafka Connect: expected Java 17 or newer and jars in {_JARS}; run `make connect`"
            )
        self._bootstrap, self._folder = bootstrap, folder
        (port,) = free_ports(_HOST)
        self.url = f"http://{_HOST}:{port}"
        self._supervisor = Supervisor()
        self._client = httpx.AsyncClient(base_url=self.url, timeout=30)

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
        private_folder(self._folder)
        properties = self._folder / "worker.properties"
        properties.write_text(self._properties())
        jars = ":".join(sorted(str(jar) for jar in (_JARS / "libs").glob("*.jar")))
        flags = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dlog4j2.level=WARN")
        main = "org.apache.kafka.connect.cli.ConnectStandalone"
        self._supervisor.start(
            ProcessSpec(
                name=_NAME,
                command=("java", *flags, "-cp", jars, main, str(properties)),
                log_file=self._folder / "connect.log",
                restart=False,
            )
        )
        await self._until(self._is_up, "Kafka Connect to answer")

    def _properties(self) -> str:
        values = {
            "bootstrap.servers": self._bootstrap,
            "listeners": self.url,
            "plugin.path": str(_JARS / "plugins"),
            "plugin.discovery": "service_load",
            "offset.storage.file.filename": str(self._folder / "connect.offsets"),
            "offset.flush.interval.ms": "1000",
        }
        for which in ("key", "value"):
            values[f"{which}.converter"] = _CONVERTER
            values[f"{which}.converter.schemas.enable"] = "false"
        return "".join(f"{name}={value}\n" for name, value in values.items())

    async def stop(self) -> None:
        """Stop the worker and all its connectors."""
        await self._client.aclose()
        await self._supervisor.stop(grace_s=_STOP_S)

    async def run(self, name: str, config: Config) -> None:
        """Create or change a connector, and wait until its tasks run.

        Raises ConfigError with Connect's message, or with the trace of a failed task.
        """
        answer = await self._client.put(f"/connectors/{name}/config", json=dict(config))
        if answer.is_error:
            raise ConfigError(f"connector {name}: {answer.text[:2_000]}")
        await self._until(lambda: self._is_running(name), f"connector {name} to run")

    async def remove(self, name: str) -> None:
        """Delete a connector by its name."""
        await self._client.delete(f"/connectors/{name}")

    async def check(self, *names: str) -> None:
        """Raise ConfigError if a task of these connectors has failed."""
        for name in names:
            await self._is_running(name)

    async def _is_running(self, name: str) -> bool:
        answer = await self._client.get(f"/connectors/{name}/status")
        if answer.is_error:
            return False
        status: dict[str, Any] = answer.json()
        tasks = status["tasks"]
        for part in (status["connector"], *tasks):
            if part["state"] == "FAILED":
                raise ConfigError(f"connector {name} has failed: {part.get('trace', '')[:2_000]}")
        return bool(tasks) and all(task["state"] == "RUNNING" for task in tasks)

    async def _is_up(self) -> bool:
        try:
            return (await self._client.get("/")).is_success
        except httpx.TransportError:
            return False

    async def _until(self, condition: Any, what: str) -> None:
        process = self._supervisor.processes[_NAME]
        try:
            async with asyncio.timeout(_START_S):
                while not await condition():
                    if process.failed:
                        raise NotReady(f"Kafka Connect has ended:\n{process.tail()}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise NotReady(f"waited {_START_S:g} s for {what}:\n{process.tail()}") from None
