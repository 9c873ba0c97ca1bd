"""The checker sees what is missing, double, out of order, invalid or off."""

import json
from pathlib import Path
from typing import Any

import pytest

from infra.bench.faults.checker import (
    Record,
    RecordDecoder,
    check_batch,
    check_pair,
    check_usage,
    counted_in,
    lines_of,
    schema_of,
)
from infra.bench.platform.questions import FORM, draw_questions
from schemas.codec import AVRO_DIR, Codec
from schemas.records import Answer

TOPIC = "prompts"
GOOD = '{"kind": "order", "count": 3, "urgent": true}'


def prompt(offset: int, key: bytes = b"k", *, value: Any = None) -> Record:
    return Record(0, offset, key, value or {"text": "?"}, {})


def answer(offset: int, key: bytes = b"k", partition: int = 0, **value: Any) -> Record:
    place = {"prompt_partition": partition, "prompt_offset": offset}
    header_fields = {"topic": TOPIC, "partition": partition, "offset": offset}
    headers = {
        f"trivium-prompt-{name}": str(field).encode() for name, field in header_fields.items()
    }
    fields = {"error_code": None, "request_id": f"r{offset}", "prompt_tokens": 4}
    fields |= {"completion_tokens": 2, "text": "!", **place, **value}
    return Record(partition, 900 + offset, key, fields, headers)


def judged(prompts: list[Record], answers: list[Record], **options: Any) -> dict[str, Any]:
    notes = options.pop(
        "notes", [{"p": record.partition, "o": record.offset} for record in prompts]
    )
    return check_pair(TOPIC, prompts, answers, options.pop("dead", []), notes, ordered=True)


def test_checker_accepts_right_answers() -> None:
    report = judged([prompt(0), prompt(1), prompt(3)], [answer(0), answer(1), answer(3)])
    wrong = ("missing", "double", "of_no_prompt", "under_another_key", "sent_but_not_there",
             "out_of_order")  # fmt: skip
    assert {name: report[name]["count"] for name in wrong} == dict.fromkeys(wrong, 0)
    assert (report["prompts"], report["sent"], report["answers"]) == (3, 3, 3)


@pytest.mark.parametrize(
    ("answers", "wrong"),
    [
        ([answer(0)], "missing"),
        ([answer(0), answer(1), answer(1)], "double"),
        ([answer(0), answer(1), answer(7)], "of_no_prompt"),
        ([answer(0), answer(1), Record(0, 9, b"k", None, {})], "of_no_prompt"),
        ([answer(0), answer(1), answer(1, prompt_offset=0)], "of_no_prompt"),
        ([answer(0), answer(1, key=b"other")], "under_another_key"),
        ([answer(1), answer(0)], "out_of_order"),
    ],
)
def test_checker_counts_wrong_answers(answers: list[Record], wrong: str) -> None:
    report = judged([prompt(0), prompt(1)], answers)
    assert report[wrong]["count"] == 1


def test_checker_orders_answers_by_key() -> None:
    prompts = [prompt(0, b"a"), prompt(1, b"b")]
    report = judged(prompts, [answer(1, b"b"), answer(0, b"a")])
    assert report["out_of_order"]["count"] == 0


def test_checker_reports_acknowledged_prompt_missing_on_log() -> None:
    report = judged([prompt(0)], [answer(0)], notes=[{"p": 0, "o": 0}, {"p": 0, "o": 5}])
    assert report["sent_but_not_there"] == {"count": 1, "some": ["(0, 5)"]}


def test_checker_requires_dead_letter_of_error() -> None:
    failed = answer(0, error_code="overloaded")
    assert judged([prompt(0)], [failed])["errors_without_dead_letter"] == 1
    report = judged([prompt(0)], [failed], dead=[prompt(0)])
    assert (report["errors"], report["errors_without_dead_letter"]) == ({"overloaded": 1}, 0)


def test_checker_validates_answers_by_schema() -> None:
    form_field = {"response_format": FORM}
    line = {"body": json.dumps({"messages": [], **form_field})}
    text = {"response_format": json.dumps(FORM)}
    values = [form_field, text, line, None, form_field]
    prompts = [prompt(number, value=value) for number, value in enumerate(values)]
    texts = [GOOD, GOOD, GOOD, "words", '{"kind": "order"}']
    answers = [answer(n, text=text) for n, text in enumerate(texts)]
    assert judged(prompts, answers)["forms"] == {
        "wanted": 4, "invalid": {"count": 1, "some": ["(0, 4)"]}
    }  # fmt: skip
    assert schema_of({"response_format": {"type": "text"}}) is None


def used(number: int, request_id: str, tokens: tuple[int, int] = (4, 2)) -> Record:
    token_fields = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    return Record(0, number, b"", {"number": number, "request_id": request_id, **token_fields}, {})


def test_usage_check_accepts_sums_counted_by_clients() -> None:
    counted = counted_in([answer(0), answer(1), answer(2, error_code="x")])
    assert counted == {"r0": (4, 2), "r1": (4, 2)}
    report = check_usage([used(0, "r0"), used(1, "r1"), used(2, "r2")], {"r0", "r1", "r2"}, counted)
    assert (report["difference_tokens"], report["gaps"], report["double"]["count"]) == (0, 0, 0)
    assert report["tokens_counted_by_clients"] == 12


def test_usage_check_reports_deviations() -> None:
    records = [used(0, "r0", (4, 3)), used(1, "r0", (4, 3)), used(3, "r9")]
    report = check_usage(records, {"r0", "r1"}, {"r0": (4, 2), "r1": (4, 2)})
    assert report["difference_tokens"] == 1 + 6
    assert report["unequal"]["count"] == 2
    assert report["double"]["some"] == ["r0"]
    assert report["gaps"] == 1
    assert report["requests_without_record"]["some"] == ["r1"]
    assert report["records_without_request"]["some"] == ["r9"]


def test_batch_check_counts_missing_and_double_lines() -> None:
    input_lines = [{"custom_id": name} for name in "abc"]
    whole = check_batch(input_lines, input_lines[:2], input_lines[2:])
    assert (whole["missing"]["count"], whole["double"]["count"], whole["errors"]) == (0, 0, 1)
    wrong = check_batch(input_lines, [input_lines[0], input_lines[0]], [])
    assert (wrong["missing"]["some"], wrong["double"]["some"]) == (["b", "c"], ["a"])


def test_record_decoder_reads_json_and_avro() -> None:
    decoder = RecordDecoder(AVRO_DIR)
    for question in draw_questions(8, 1):
        assert decoder.decode(question.prompt(Codec()))["text"] == question.text
    raw_answer = Codec().encode(Answer(prompt_topic=TOPIC, prompt_partition=1, prompt_offset=2))
    assert decoder.decode(raw_answer)["prompt_offset"] == 2
    assert decoder.decode(None) is None


def test_lines_of_ignores_incomplete_line(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text('{"p": 1}\n{"p": ')
    assert list(lines_of(str(tmp_path / "notes"))) == [{"p": 1}]
    assert list(lines_of(str(tmp_path / "nowhere"))) == []
