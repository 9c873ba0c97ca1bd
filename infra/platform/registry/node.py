"""Runs a temporary schema registry, for tests and trials: Apicurio, as one JVM.

It keeps ids and schemas in memory, so they are lost when it stops. Not for a deployment.
"""

import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.broker.probe import free_ports
from infra.processes import tether
from schemas.errors import ConfigError, NotReady

_APP = Path(__file__).parents[3] / "build" / "registry" / "app"
_HOST, _CONFLUENT = "127.0.0.1", "/apis/ccompat/v7"
_START_S, _STOP_S, _POLL_S = 120.0, 20.0, 0.1


@contextmanager
def running_apicurio(java: str = "java") -> Iterator[str]:
    """Start a new, empty registry, and yield the URL of its API that is compatible with
    Confluent's.

    It ends with the thread that started it. Raises ConfigError where it is not installed.
    """
    jars = sorted(_APP.glob("*-runner.jar"))
    if not jars or shutil.which(java) is None:
        raise ConfigError(
            f"a schema registry: expected Java 17 and Apicurio in {_APP}; run `make registry`"
        )
    (port,) = free_ports(_HOST)
    command = [
        java,
        "-Xmx384m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-jar",
        str(jars[0]),
    ]
    tethered = tether.tethered(*command)
    env = {**os.environ, "QUARKUS_HTTP_HOST": _HOST, "QUARKUS_HTTP_PORT": str(port)}
    url = f"http://{_HOST}:{port}{_CONFLUENT}"
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            tethered, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env
        )
        try:
            _wait(process, url)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/subjects", timeout=5):
                return
        except (OSError, urllib.error.HTTPError):
            time.sleep(_POLL_S)
    raise NotReady(f"the schema registry did not answer at {url} within {_START_S:g} s")
