"""A plain Java consumer with Apache Avro's own decoder reads every topic."""

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from schemas.settings import LogSettings
from schemas.topics import TOPICS
from tests.infra.platform.topics_filled import fill
from tests.waits import PATIENCE_S

ROOT = Path(__file__).parents[4]
LIBS = ROOT / "build" / "java" / "libs"
pytestmark = [
    pytest.mark.kafka,
    pytest.mark.platform,
    pytest.mark.skipif(shutil.which("javac") is None, reason="needs a JDK, Java 17 or newer"),
    pytest.mark.skipif(not LIBS.exists(), reason="needs the jars of `make test-platform`"),
]


def read(log: LogSettings, topic: str) -> list[list[str]]:
    source = ROOT / "infra" / "platform" / "java" / "ReadRecords.java"
    schemas = (str(ROOT / "schemas" / "avro"), str(ROOT / "schemas" / "history"))
    command = ["java", "-Xmx256m", "-cp", f"{LIBS}/*", str(source), log.bootstrap, topic, *schemas]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert process.returncode == 0, process.stderr[-2_000:]
    return [line.split("\t", 2) for line in process.stdout.splitlines()]


async def test_java_consumer_decodes_every_topic(kafka: LogSettings) -> None:
    await fill(kafka)
    topics = ",".join(kafka.topic_prefix + topic.name for topic in TOPICS.values())
    counts = Counter(name for name, _, _ in read(kafka, topics))
    expected = Counter(name for topic in TOPICS.values() for name in topic.records)
    assert counts == expected | Counter(["JSON"])


async def test_java_consumer_returns_field_values(kafka: LogSettings) -> None:
    await fill(kafka)
    rows = {name: json.loads(value) for name, _, value in read(kafka, f"{kafka.topic_prefix}usage")}
    assert rows["Usage"]["tenant"] == "tenant é"
    assert rows["Usage"]["priority"] == "batch"
