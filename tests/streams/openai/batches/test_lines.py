"""What is wrong with a batch's file, and how its lines are answered."""

import json
from typing import Any

import pytest

from schemas.errors import UnknownModel
from schemas.records import Answer
from streams.openai.batches import lines
from streams.openai.batches.lines import (
    EMBEDDINGS,
    ENDPOINTS,
    ERRORS_MAX,
    MESSAGES,
    FileCheck,
    answer_line,
    call_of,
    unanswered_line,
)
from tests.streams.gateway.batch_samples import line
from tests.streams.gateway.samples import MODEL


def check_model(model: str) -> None:
    if model != MODEL:
        raise UnknownModel(f"model: expected {MODEL!r}, found {model!r}")


def checked(*texts: Any) -> FileCheck:
    check = FileCheck(ENDPOINTS[0], check_model)
    for number, text in enumerate(texts, 1):
        check.add(number, text if isinstance(text, bytes) else json.dumps(text).encode())
    return check


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in line().items() if key != name}


def with_body(**fields: Any) -> dict[str, Any]:
    return line(body={**line()["body"], **fields})


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xef\xbb\xbf\xef\xbb\xbf{}", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (without("custom_id"), "missing_required_parameter", "custom_id"),
        (without("method"), "missing_required_parameter", "method"),
        (without("url"), "missing_required_parameter", "url"),
        (without("body"), "missing_required_parameter", "body"),
        (with_body(model=None), "missing_required_parameter", "body.model"),
        (line(custom_id=7), "invalid_type", "custom_id"),
        (line(custom_id=""), "invalid_custom_id", "custom_id"),
        (line(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
        (line(body="a"), "invalid_type", "body"),
        (line(custom_id="first"), "duplicate_custom_id", "custom_id"),
        (line(url=ENDPOINTS[1]), "url_mismatch", "url"),
        (line(method="GET"), "invalid_method", "method"),
        (with_body(model="gpt-9"), "model_not_found", "body.model"),
        (with_body(stream=True), "invalid_value", "body.stream"),
    ],
)
def test_file_check_reports_line_error(wrong: Any, code: str, param: str | None) -> None:
    """The error has the number of its line, as OpenAI lists it."""
    (error,) = checked(line(custom_id="first"), wrong, line(custom_id="last")).errors
    assert (error["code"], error["line"], error["param"]) == (code, 2, param)
    assert error["message"]


def test_file_check_accepts_byte_order_mark() -> None:
    """.NET and PowerShell write such files."""
    assert not checked(b"\xef\xbb\xbf" + json.dumps(line()).encode()).errors


def test_file_check_leaves_embedding_models_to_workers() -> None:
    check = FileCheck(EMBEDDINGS, check_model)
    body = {"model": "minilm", "input": "a"}
    check.add(1, json.dumps(line(url=EMBEDDINGS, body=body)).encode())
    assert check.errors == []


def test_file_check_reports_errors_of_whole_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [error["code"] for error in checked().errors] == ["empty_file"]
    assert checked(line()).errors == []
    many = checked(*[b"{"] * (ERRORS_MAX + 1))
    assert many.is_over
    monkeypatch.setattr(lines, "LINES_MAX", 2)
    too_long = checked(line(1), line(2), line(3))
    assert too_long.is_over
    assert [(error["code"], error["line"]) for error in too_long.errors] == [
        ("too_many_tasks", None)
    ]


def test_batch_line_becomes_prompt_unchanged() -> None:
    prompt = call_of(json.dumps(line(custom_id="é")).encode()).prompt(ENDPOINTS[0])
    assert prompt.endpoint == ENDPOINTS[0]
    assert json.loads(prompt.body or "") == line(custom_id="é")["body"]


def answer(**fields: Any) -> Answer:
    place = {"prompt_topic": "batch.prompts", "prompt_partition": 0, "prompt_offset": 0}
    return Answer(**{**place, "request_id": "r1", **fields})


def test_answer_line_has_openai_shape() -> None:
    text, is_error = answer_line("batch_req_1_0", "a", answer(body='{"id": "chatcmpl-r1"}'))
    response = {"status_code": 200, "request_id": "r1", "body": {"id": "chatcmpl-r1"}}
    assert text.endswith(b"}\n") and not is_error
    assert json.loads(text) == {
        "id": "batch_req_1_0",
        "custom_id": "a",
        "response": response,
        "error": None,
    }
    text, is_error = answer_line(
        "batch_req_1_0", "a", answer(error_code="context_length_exceeded", error_message="too long")
    )
    failure = json.loads(text)["response"]
    assert is_error and failure["status_code"] == 400
    assert failure["body"]["error"] == {
        "message": "too long",
        "type": "invalid_request_error",
        "param": None,
        "code": "context_length_exceeded",
    }
    assert answer_line("x", "a", answer())[1], "no answer, and no error: an error of ours"


def test_error_line_of_message_has_anthropic_shape() -> None:
    refused = answer(error_code="context_length_exceeded", error_message="9 tokens")
    text, is_error = answer_line("batch_req_1_0", "a", refused, MESSAGES)
    failure = json.loads(text)["response"]
    assert is_error and failure["status_code"] == 400
    assert failure["body"] == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "prompt is too long: 9 tokens",
            "details": {"error_code": "context_length_exceeded"},
        },
        "request_id": "r1",
    }


@pytest.mark.parametrize("status", ["expired", "cancelled"])
def test_unanswered_line_states_reason(status: str) -> None:
    result = json.loads(unanswered_line("batch_req_1_0", "a", status))
    assert result["response"] is None and result["error"]["code"] == f"batch_{status}"
