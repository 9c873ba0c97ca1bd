"""Keeps Kafka's classes as the JVM has them in memory: `python -m infra.broker.class_archive`.

At set-up; a broker then starts with three fifths of the CPU time. The archive lies beside the jars
that it was made of, and takes its name once all of it is on the disk. A JVM of another version
starts without it; the Makefile has it made again when Java has changed. A formatted storage is kept
beside it (`storage.py`).
"""

import asyncio
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from infra.broker import storage
from infra.broker.node import DEFAULT_LIBS, Broker, class_archive
from infra.broker.section import BrokerSettings
from schemas.errors import TriviumError
from schemas.log.admin import create_topics
from schemas.settings import LogSettings

_S = 300.0  # on a machine with much else to do: one that is killed leaves no archive


def make(archive: Path) -> None:
    """Of a broker that starts, makes topics and ends, which is when the JVM writes it.

    Where none comes it says so: brokers start without it, too.
    """
    archive.unlink(missing_ok=True)  # a JVM that uses one writes none
    draft = archive.with_name(f"{archive.name}.new")
    draft.unlink(missing_ok=True)
    try:
        _dump(draft)
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.replace(archive)
    except (OSError, TriviumError) as error:
        draft.unlink(missing_ok=True)
        sys.stderr.write(
            f"no archive of Kafka's classes was made, brokers start slower without it: {error}\n"
        )


def _dump(draft: Path) -> None:
    kept = storage.kept_storage(draft.parent / DEFAULT_LIBS.name)
    storage.drop(kept)
    flags = (*BrokerSettings().jvm_flags, f"-XX:ArchiveClassesAtExit={draft}")
    with TemporaryDirectory() as folder:
        settings = BrokerSettings(port=0, jvm_flags=flags, start_timeout_s=_S, stop_timeout_s=_S)
        broker = Broker(settings, Path(folder), tethered=True)
        try:
            storage.keep(broker.format(), kept)
            asyncio.run(create_topics(LogSettings(bootstrap=broker.start())))
        finally:
            broker.stop()


if __name__ == "__main__":
    make(class_archive(DEFAULT_LIBS))
