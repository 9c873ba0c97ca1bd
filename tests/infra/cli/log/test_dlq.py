"""`trivium dlq`: listed, shown and sent again."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from schemas.codec import Codec, to_dict
from schemas.log.clients import LogProducer
from schemas.settings import LogSettings
from tests.conftest import _fresh_topics
from tests.infra.cli.running import Ran, trivium_here
from tests.schemas.examples import example
from tests.schemas.log.test_dead_letters import bury_some, prompts

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def empty(bootstrap: str) -> LogSettings:
    """Topics to which no test of this file writes."""
    return asyncio.run(_fresh_topics(bootstrap))


def dlq(kafka: LogSettings, *arguments: str) -> Ran:
    env = {"TRIVIUM_LOG_TOPIC_PREFIX": kafka.topic_prefix}
    return trivium_here("dlq", *arguments, "--bootstrap", kafka.bootstrap, env=env)


def shown(kafka: LogSettings, *arguments: str) -> Any:
    code, output, errors = dlq(kafka, *arguments, "--json")
    assert (code, errors) == (0, ""), errors
    return json.loads(output)


def test_letters_are_listed_shown_and_sent_again(kafka: LogSettings) -> None:
    asyncio.run(bury_some(kafka, [b'{"text": 1}', b"[/red]\x1b", b"\xff\x00".hex().encode()]))
    topic = f"{kafka.topic_prefix}prompts"
    listed = shown(kafka, "list")
    assert listed["waiting"] == {topic: 3} and listed["retried"] == {}
    names = [letter["name"] for letter in listed["newest"]]
    assert names == [f"{topic}/0/{offset}" for offset in range(3)]
    assert shown(kafka, "list", "-n", "0")["newest"] == []
    assert shown(kafka, "list", "--before", "1h")["waiting"] == {}
    assert shown(kafka, "list", "--topic", "prompts", "--since", "1h", "--error", "text") == {
        "waiting": {topic: 1},
        "retried": {},
        "newest": listed["newest"][:1],
    }
    code, output, _ = dlq(kafka, "list")
    assert code == 0 and "[/red]\\x1b" in output and "\x1b" not in output

    one = shown(kafka, "show", "prompts/0/0")
    assert one["kind"] == "json" and one["value"] == {"text": 1}
    assert one["headers"] == {"trace": "u"} and one["dead_letter"]["error-class"] == "RecordError"
    assert shown(kafka, "show", names[1])["kind"] == "text"
    code, output, _ = dlq(kafka, "show", names[1])
    assert code == 0 and "error-message: no prompt: [/red]\\x1b" in output

    assert shown(kafka, "retry", "--all", "--dry-run")["sent"] == 3
    assert shown(kafka, "retry", names[1])["sent"] == 1
    assert "2 sent again; 1 were before" in dlq(kafka, "retry", "--topic", "prompts")[1]
    assert len(asyncio.run(prompts(kafka))) == 6
    assert shown(kafka, "list")["retried"] == {topic: 3}


def test_a_record_is_shown_as_one(kafka: LogSettings) -> None:
    """Whatever had it when it failed is told."""
    record, codec = example("trivium.Prompt"), Codec()

    async def write() -> None:
        told = {
            "attempts": b"5",
            "worker": b"decode-1",
            "reason": b"lost",
            "error-class": b"WorkerLost",
        }
        headers = [(f"x-dlq-{name}", value) for name, value in told.items()]
        dead = f"{kafka.topic_prefix}prompts.dlq"
        async with LogProducer(kafka, codec, durable=True, client_id="test") as producer:
            for value in (codec.encode(record), b"\x00\xff"):
                await (await producer.send_raw(dead, value, key=b"q", partition=0, headers=headers))

    asyncio.run(write())
    one = shown(kafka, "show", "prompts/0/0")
    assert one["kind"] == "Prompt" and one["value"]["text"] == to_dict(record)["text"]
    assert one["dead_letter"]["worker"] == "decode-1" and one["dead_letter"]["attempts"] == "5"
    assert shown(kafka, "show", "prompts/0/1")["value"] == "00ff"
    code, output, _ = dlq(kafka, "show", "prompts/0/0")
    assert code == 0 and "attempts: 5\n" in output and "reason: lost\n" in output


def test_topics_of_pairs_have_letters_too(kafka: LogSettings, tmp_path: Path) -> None:
    """Pairs of the settings are named in full."""
    prompts_of_pair = f"{kafka.topic_prefix}answers"  # any topic that is there
    settings = tmp_path / "trivium.toml"
    other = f"{kafka.topic_prefix}other"
    settings.write_text(f'[[bridge.pairs]]\nprompts = "{other}"\nanswers = "{prompts_of_pair}"\n')
    code, output, errors = dlq(kafka, "list", "--config", str(settings))
    assert (code, output, errors) == (0, "no dead letters\n", ""), "that topic is not there yet"
    code, _, errors = dlq(kafka, "list", "--config", str(settings), "--topic", other)
    assert code == 2 and f"no dead letters of {other}" in errors


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("retry",), "expected letters' names, --topic, --since, --before, --error or --all"),
        (("show", "prompts"), "expected TOPIC/PARTITION/OFFSET, found 'prompts'"),
        (("show", "prompts/0/77"), "expected a name that `trivium dlq list` shows"),
        (("retry", "prompts/0/77"), "expected names that `trivium dlq list` shows"),
        (("list", "--since", "long"), "--since: expected a duration"),
        (("list", "--before", "long"), "--before: expected a duration"),
        (("list", "--topic", "nobodys"), "no dead letters of nobodys"),
    ],
)
def test_what_is_not_there_is_said(empty: LogSettings, arguments: Any, why: str) -> None:
    code, _, errors = dlq(empty, *arguments)
    assert code == 2 and why in errors and errors.count("\n") == 1
