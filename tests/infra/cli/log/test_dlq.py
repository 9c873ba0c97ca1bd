"""`trivium dlq`: listed, shown and sent again."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from schemas.codec import Codec, to_dict
from schemas.settings import LogSettings
from streams.log.clients import LogProducer
from tests.conftest import _fresh_topics
from tests.infra.cli.trivium_runner import Ran, trivium_here
from tests.schemas.examples import example
from tests.streams.log.test_dead_letters import bury_some, prompts

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def empty(bootstrap: str) -> LogSettings:
    """Topics to which no test of this file writes."""
    return asyncio.run(_fresh_topics(bootstrap))


def dlq(kafka: LogSettings, *arguments: str) -> Ran:
    env = {"TRIVIUM_LOG_TOPIC_PREFIX": kafka.topic_prefix}
    return trivium_here("dlq", *arguments, "--bootstrap", kafka.bootstrap, env=env)


def dlq_json(kafka: LogSettings, *arguments: str) -> Any:
    code, output, errors = dlq(kafka, *arguments, "--json")
    assert (code, errors) == (0, ""), errors
    return json.loads(output)


def test_dlq_command_lists_shows_and_retries_letters(kafka: LogSettings) -> None:
    asyncio.run(bury_some(kafka, [b'{"text": 1}', b"[/red]\x1b", b"\xff\x00".hex().encode()]))
    topic = f"{kafka.topic_prefix}prompts"
    listed = dlq_json(kafka, "list")
    assert listed["waiting"] == {topic: 3} and listed["retried"] == {}
    names = [letter["name"] for letter in listed["newest"]]
    assert names == [f"{topic}/0/{offset}" for offset in range(3)]
    assert dlq_json(kafka, "list", "-n", "0")["newest"] == []
    assert dlq_json(kafka, "list", "--before", "1h")["waiting"] == {}
    assert dlq_json(kafka, "list", "--topic", "prompts", "--since", "1h", "--error", "text") == {
        "waiting": {topic: 1},
        "retried": {},
        "newest": listed["newest"][:1],
    }
    code, output, _ = dlq(kafka, "list")
    assert code == 0 and "[/red]\\x1b" in output and "\x1b" not in output

    letter = dlq_json(kafka, "list", "prompts/0/0")
    assert letter["kind"] == "json" and letter["value"] == {"text": 1}
    assert (
        letter["headers"] == {"trace": "u"}
        and letter["dead_letter"]["error-class"] == "RecordError"
    )
    assert dlq_json(kafka, "list", names[1])["kind"] == "text"
    code, output, _ = dlq(kafka, "list", names[1])
    assert code == 0 and "error-message: no prompt: [/red]\\x1b" in output

    assert dlq_json(kafka, "retry", "--all", "--dry-run")["sent"] == 3
    assert dlq_json(kafka, "retry", names[1])["sent"] == 1
    assert "2 sent again; 1 had been sent before" in dlq(kafka, "retry", "--topic", "prompts")[1]
    assert len(asyncio.run(prompts(kafka))) == 6
    assert dlq_json(kafka, "list")["retried"] == {topic: 3}


def test_dlq_show_decodes_record_and_headers(kafka: LogSettings) -> None:
    record, codec = example("trivium.Prompt"), Codec()

    async def write() -> None:
        origin = {
            "attempts": b"5",
            "worker": b"decode-1",
            "reason": b"lost",
            "error-class": b"WorkerLost",
        }
        headers = [(f"x-dlq-{name}", value) for name, value in origin.items()]
        dead = f"{kafka.topic_prefix}prompts.dlq"
        async with LogProducer(kafka, codec, durable=True, client_id="test") as producer:
            for value in (codec.encode(record), b"\x00\xff"):
                await (await producer.send_raw(dead, value, key=b"q", partition=0, headers=headers))

    asyncio.run(write())
    letter = dlq_json(kafka, "list", "prompts/0/0")
    assert letter["kind"] == "Prompt" and letter["value"]["text"] == to_dict(record)["text"]
    assert (
        letter["dead_letter"]["worker"] == "decode-1" and letter["dead_letter"]["attempts"] == "5"
    )
    assert dlq_json(kafka, "list", "prompts/0/1")["value"] == "00ff"
    code, output, _ = dlq(kafka, "list", "prompts/0/0")
    assert code == 0 and "attempts: 5\n" in output and "reason: lost\n" in output


def test_dlq_list_covers_topics_of_bridge_pairs(kafka: LogSettings, tmp_path: Path) -> None:
    """Topics of bridge pairs are given in full, without the prefix."""
    prompts_of_pair = f"{kafka.topic_prefix}answers"  # any topic that is there
    settings = tmp_path / "trivium.toml"
    other_topic = f"{kafka.topic_prefix}other"
    settings.write_text(
        f'[[bridge.pairs]]\nprompts = "{other_topic}"\nanswers = "{prompts_of_pair}"\n'
    )
    code, output, errors = dlq(kafka, "list", "--config", str(settings))
    assert (code, output, errors) == (0, "no dead letters\n", ""), "that topic is not there yet"
    code, _, errors = dlq(kafka, "list", "--config", str(settings), "--topic", other_topic)
    assert code == 2 and f"no dead letters of {other_topic}" in errors


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("retry",), "expected letters' names, --topic, --since, --before, --error or --all"),
        (("list", "prompts"), "expected TOPIC/PARTITION/OFFSET, found 'prompts'"),
        (("list", "prompts/0/77"), "expected a name that `trivium dlq list` shows"),
        (("retry", "prompts/0/77"), "expected names that `trivium dlq list` shows"),
        (("list", "--since", "long"), "--since: expected a duration"),
        (("list", "--before", "long"), "--before: expected a duration"),
        (("list", "--topic", "nobodys"), "no dead letters of nobodys"),
    ],
)
def test_dlq_command_rejects_bad_arguments(empty: LogSettings, arguments: Any, why: str) -> None:
    code, _, errors = dlq(empty, *arguments)
    assert code == 2 and why in errors and errors.count("\n") == 1
