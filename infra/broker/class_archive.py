"""Keeps Kafka's classes as the JVM has them in memory: `python -m infra.broker.class_archive`.

At set-up; a broker then starts with three fifths of the CPU time. The archive lies beside the jars
that it was made of. A JVM that cannot use it, as another version, starts without it.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from infra.broker.node import DEFAULT_LIBS, Broker, class_archive
from infra.broker.section import BrokerSettings
from schemas.log.admin import create_topics
from schemas.settings import LogSettings

_S = 300.0  # on a machine with much else to do: one that is killed leaves no archive


def make(archive: Path) -> None:
    """Of a broker that starts, makes topics and ends, which is when the JVM writes it."""
    archive.unlink(missing_ok=True)
    flags = (*BrokerSettings().jvm_flags, f"-XX:ArchiveClassesAtExit={archive}")
    with TemporaryDirectory() as folder:
        settings = BrokerSettings(port=0, jvm_flags=flags, start_timeout_s=_S, stop_timeout_s=_S)
        broker = Broker(settings, Path(folder), tethered=True)
        try:
            asyncio.run(create_topics(LogSettings(bootstrap=broker.start())))
        finally:
            broker.stop()


if __name__ == "__main__":
    make(class_archive(DEFAULT_LIBS))
