"""kcat, as Debian has it, reads every topic and writes prompts."""

import json
import shutil
import subprocess

import pytest

from schemas.settings import LogSettings
from tests.infra.platform.topics_filled import ANSWER, KEY, fill
from tests.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(
        shutil.which("kcat") is None, reason="needs kcat (Debian: apt-get install kcat)"
    ),
]


def kcat(log: LogSettings, *flags: str, sent: bytes = b"") -> bytes:
    command = ["kcat", "-q", "-b", log.bootstrap, *flags]
    return subprocess.run(
        command, input=sent, capture_output=True, check=True, timeout=PATIENCE_S
    ).stdout


async def test_every_topic_is_read_with_keys_headers_and_whole_values(kafka: LogSettings) -> None:
    for topic, values in (await fill(kafka)).items():
        lines = kcat(kafka, "-C", "-e", "-t", topic, "-f", "%k %h %S\n").splitlines()
        assert lines == [KEY + b" ce_type=x %d" % len(value) for value in values], topic


async def test_an_answer_in_json_is_read_as_it_is(kafka: LogSettings) -> None:
    await fill(kafka)
    whole = kcat(kafka, "-C", "-e", "-o", "-1", "-t", f"{kafka.topic_prefix}answers", "-p", "0")
    assert whole.strip() == ANSWER


def test_a_prompt_is_written_with_key_and_value(kafka: LogSettings) -> None:
    topic = f"{kafka.topic_prefix}prompts"
    kcat(kafka, "-P", "-K", "\t", "-t", topic, sent=b'k\t{"text": "Who?"}\n')
    (line,) = kcat(kafka, "-C", "-e", "-J", "-t", topic).splitlines()
    found = json.loads(line)
    assert (found["key"], json.loads(found["payload"])) == ("k", {"text": "Who?"})
