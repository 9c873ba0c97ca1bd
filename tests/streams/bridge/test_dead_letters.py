"""Prompts without an answer: what lies on the topic of dead letters."""

from typing import Any

import pytest

from schemas.errors import InvalidRequest, WorkerLost
from schemas.rules.sizes import RECORD_BYTES_MAX
from streams.bridge.dead_letters import dead_letter
from tests.streams.bridge.samples import record


def test_dead_letter_describes_error_and_origin() -> None:
    prompt = record({"text": "hi"}, headers=[("mine", b"x"), ("none", None)])
    error = WorkerLost("worker w1 fell silent")
    letter = dead_letter(prompt, error, attempts=5, worker="w1", reason="queued", request_id="q")
    assert (letter.topic, letter.partition) == ("rows.dlq", 0)
    assert (letter.key, letter.value) == (prompt.key, prompt.value)
    assert dict(letter.headers) == {
        "mine": b"x",
        "none": None,
        "x-dlq-error-class": b"WorkerLost",
        "x-dlq-error-code": b"worker_lost",
        "x-dlq-error-message": b"worker w1 fell silent",
        "x-dlq-error-retriable": b"true",
        "x-dlq-topic": b"rows",
        "x-dlq-partition": b"1",
        "x-dlq-offset": b"7",
        "x-dlq-timestamp": b"5",
        "x-dlq-attempts": b"5",
        "x-dlq-worker": b"w1",
        "x-dlq-reason": b"queued",
        "x-dlq-request-id": b"q",
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"value": b"x" * RECORD_BYTES_MAX},
        {"key": b"k" * (RECORD_BYTES_MAX - 1_000)},
        {"headers": [("h", b"x" * RECORD_BYTES_MAX)]},
    ],
    ids=["value", "key", "headers"],
)
def test_dead_letter_keeps_only_origin_of_too_large_prompt(fields: dict[str, Any]) -> None:
    value = fields.pop("value", b"{}")
    letter = dead_letter(record(value, **fields), InvalidRequest("m \ud800" + "x" * 9_000))
    assert (letter.key, letter.value) == (b"", None)
    assert dict(letter.headers)["x-dlq-offset"] == b"7"
    assert letter.bytes_at_most < 10_000


def test_dead_letter_of_empty_record_has_key() -> None:
    assert dead_letter(record(None, key=None), InvalidRequest("m")).key == b""
    assert dead_letter(record(None), InvalidRequest("m")).key == b"k"
    assert dead_letter(record(b"{}", key=None), InvalidRequest("m")).key is None


def test_dead_letter_at_exact_limit_is_complete() -> None:
    prompt, error = record({"text": "hi"}), InvalidRequest("m")
    whole = dead_letter(prompt, error)
    headers = dict(whole.headers)
    assert [headers[f"x-dlq-{name}"] for name in ("worker", "reason", "request-id")] == [b""] * 3
    assert headers["x-dlq-attempts"] == b"0", "nobody was asked"
    assert dead_letter(prompt, error, bytes_max=whole.bytes_at_most) == whole
    assert dead_letter(prompt, error, bytes_max=whole.bytes_at_most - 1).value is None
