"""kcat, as Debian has it, reads every topic and writes prompts."""

import json
import shutil
import subprocess

import pytest

from schemas.settings import LogSettings
from tests.infra.platform.topics_filled import ANSWER, KEY, fill
from tests.waits import PATIENCE_S

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(
        shutil.which("kcat") is None, reason="needs kcat (Debian: apt-get install kcat)"
    ),
]


def kcat(log: LogSettings, *flags: str, payload: bytes = b"") -> bytes:
    command = ["kcat", "-q", "-b", log.bootstrap, *flags]
    return subprocess.run(
        command, input=payload, capture_output=True, check=True, timeout=PATIENCE_S
    ).stdout


async def test_kcat_reads_keys_headers_and_values_of_every_topic(kafka: LogSettings) -> None:
    for topic, values in (await fill(kafka)).items():
        lines = kcat(kafka, "-C", "-e", "-t", topic, "-f", "%k %h %S\n").splitlines()
        assert lines == [KEY + b" ce_type=x %d" % len(value) for value in values], topic


async def test_kcat_reads_json_answer_verbatim(kafka: LogSettings) -> None:
    await fill(kafka)
    whole = kcat(kafka, "-C", "-e", "-o", "-1", "-t", f"{kafka.topic_prefix}answers", "-p", "0")
    assert whole.strip() == ANSWER


def test_kcat_writes_prompt_with_key_and_value(kafka: LogSettings) -> None:
    topic = f"{kafka.topic_prefix}prompts"
    kcat(kafka, "-P", "-K", "\t", "-t", topic, payload=b'k\t{"text": "Who?"}\n')
    (line,) = kcat(kafka, "-C", "-e", "-J", "-t", topic).splitlines()
    message = json.loads(line)
    assert (message["key"], json.loads(message["payload"])) == ("k", {"text": "Who?"})
