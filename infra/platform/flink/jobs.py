"""Runs a Flink SQL script as one process, and reads the results from its log.

Flink starts its mini-cluster in the same JVM. The module depends on Trivium only for the paths of
jars; the scripts beside this file define the jobs.
"""

import re
import shutil
from pathlib import Path
from string import Template

from infra.processes.supervisor import ProcessSpec, SupervisedProcess
from schemas.errors import ConfigError

HERE = Path(__file__).parent
LIBS = HERE.parents[2] / "build" / "flink" / "libs"
_OPENED = ("java.base/java.util", "java.base/java.lang", "java.base/java.time")
_RESTART = re.compile(r"from state \w+ to RESTARTING")


def script(*names: str, **values: object) -> str:
    """Return scripts of this folder joined, with `${name}` replaced by values, quotes escaped."""
    text = "\n".join((HERE / name).read_text() for name in names)
    return Template(text).substitute({key: _quoted(value) for key, value in values.items()})


def _quoted(value: object) -> str:
    return str(value).replace("'", "''")


class SqlJob:
    """One script. It ends when its jobs have ended, or with `stop`, and is never restarted."""

    def __init__(
        self,
        text: str,
        folder: Path,
        *,
        name: str = "flink",
        heap_mb: int = 768,
        libs: Path = LIBS,
    ) -> None:
        check_jars(libs)
        folder.mkdir(parents=True, exist_ok=True)
        script_file = folder / f"{name}.sql"
        script_file.write_text(text)
        opens = [f"--add-opens={package}=ALL-UNNAMED" for package in _OPENED]
        command = (
            *("java", f"-Xmx{heap_mb}m", *opens),
            f"-Dlog4j2.configurationFile={HERE / 'log4j2.xml'}",
            *("-cp", f"{libs}/*", str(HERE / "Sql.java"), str(script_file)),
        )
        self._log_file = folder / f"{name}.log"
        spec = ProcessSpec(
            name=name, command=command, log_file=self._log_file, restart=False, grace_s=10
        )
        self.process = SupervisedProcess(spec)

    def start(self) -> None:
        """Start in the background; the first row comes after about 20 s."""
        self._log_file.unlink(missing_ok=True)
        self.process.start()

    async def wait_for_exit(self) -> int:
        """Wait for the end of the script; return its exit code, 0 if all jobs finished."""
        while self.process.exit_code is None:
            self.process.changed.clear()
            await self.process.changed.wait()
        return self.process.exit_code

    async def stop(self) -> None:
        """Stop the process, whether it has ended or not."""
        await self.process.stop()

    def restarts(self) -> int:
        """Return how often one of its jobs was restarted."""
        return len(_RESTART.findall(self._log()))

    def rows(self) -> list[list[str]]:
        """Return the rows that the SELECTs have printed."""
        lines = self._log().splitlines()
        return [line.split("\t")[1:] for line in lines if line.startswith("row\t")]

    def _log(self) -> str:
        return self._log_file.read_text(errors="replace") if self._log_file.exists() else ""


def check_jars(libs: Path = LIBS) -> None:
    """Raise ConfigError where Java's compiler or Flink's jars are missing."""
    if shutil.which("javac") is None:
        raise ConfigError(
            "expected a JDK, Java 17 or newer, found no javac; install it "
            "(Debian: apt-get install openjdk-17-jdk-headless)"
        )
    if not any(libs.glob("flink-*.jar")):
        raise ConfigError(f"expected Flink's jars in {libs}, found none; run `make test-platform`")
