"""What every engine does with an answer whose first tokens another engine has generated.

The rest must be as if nothing had been interrupted, whatever state the rest depends on.
"""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from schemas.errors import PriorRefused
from schemas.records import Structured, StructuredKind
from tests.workers.llm.engine_pair import Pair
from tests.workers.llm.engines import Answer, collected, handed_over, job
from tests.workers.llm.engines import prompt as make_prompt

PROMPT = make_prompt(40, salt=11)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "name": {"type": "string", "maxLength": 4}},
    "required": ["ok", "name"],
    "additionalProperties": False,
}
CALL = {
    "type": "tag",
    "begin": "<call>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</call>",
}
AUTO = {"type": "triggered_tags", "triggers": ["<call"], "tags": [CALL]}


def tag(form: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


FORMS = [
    Structured(kind=StructuredKind.JSON_SCHEMA, value=json.dumps(SCHEMA)),
    Structured(kind=StructuredKind.JSON_OBJECT, value=""),
    Structured(kind=StructuredKind.REGEX, value="[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    Structured(kind=StructuredKind.CHOICE, value='["left of it", "right of it"]'),
    Structured(kind=StructuredKind.GRAMMAR, value='root ::= "ab" | "c" root'),
    Structured(kind=StructuredKind.STRUCTURAL_TAG, value=tag({**AUTO, "at_least_one": True})),
    Structured(kind=StructuredKind.STRUCTURAL_TAG, value=tag(AUTO)),
]


def places(whole: Answer) -> list[tuple[int, int]]:
    """Some of the places, in tokens and characters, at which readers could have stopped."""
    reached, tokens, chars = [], 0, 0
    for output in whole.outputs[:-1]:
        tokens, chars = tokens + len(output.token_ids), chars + len(output.text)
        reached.append((tokens, chars))
    step = max(1, len(reached) // 5)
    return [*reached[::step], *reached[-1:]]


def rests(pair: Pair, places: Sequence[tuple[int, int]], whole: Answer, **fields: Any) -> Any:
    """The answers that continue at these places."""
    jobs = [
        job([*PROMPT, *whole.token_ids[:tokens]], prior_tokens=tokens, prior_chars=chars, **fields)
        for tokens, chars in places
    ]
    return pair.run(collected(pair.consumer, *jobs))


def assert_same_everywhere(pair: Pair, whole: Answer, **fields: Any) -> None:
    cuts = places(whole)
    assert cuts
    for (tokens, chars), rest in zip(cuts, rests(pair, cuts, whole, **fields), strict=True):
        where = f"after {tokens} tokens: {rest.last}"
        assert rest.token_ids == whole.token_ids[tokens:], where
        assert rest.text == whole.text[chars:], where
        assert rest.last.finish_reason == whole.last.finish_reason, where
        assert rest.last.stop_reason == whole.last.stop_reason, where


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.kind}-{form.value[-20:]}")
def test_answer_with_form_continues(pair: Pair, form: Structured) -> None:
    fields: dict[str, Any] = {"structured": form, "max_tokens": 60, "ignore_eos": False}
    whole = pair.answer(prompt_tokens=PROMPT, **fields)
    assert whole.last.finish_reason in ("stop", "length"), whole.last
    assert_same_everywhere(pair, whole, **fields)


def test_ended_form_ends_at_once(pair: Pair) -> None:
    fields: dict[str, Any] = {"structured": FORMS[0], "max_tokens": 60, "ignore_eos": False}
    whole = pair.answer(prompt_tokens=PROMPT, **fields)
    assert whole.last.finish_reason == "stop"
    (rest,) = rests(pair, [(len(whole.token_ids), len(whole.text))], whole, **fields)
    assert (rest.token_ids, rest.text, rest.last.finish_reason) == ([], "", "stop")


def test_form_that_refuses_prior_tokens_is_reported(pair: Pair) -> None:
    """As an error of its own, with which the router restarts the answer."""
    fields: dict[str, Any] = {"structured": FORMS[0], "max_tokens": 60, "ignore_eos": False}
    whole = pair.answer(prompt_tokens=PROMPT, **fields)
    backwards = [*reversed(whole.token_ids[:-1])]  # it begins with what closes the object
    tokens = [*PROMPT, *backwards]
    refused = pair.answer(
        prompt_tokens=tokens, prior_tokens=len(backwards), prior_chars=1, **fields
    )
    assert (refused.token_ids, refused.error_code) == ([], PriorRefused.code)
    assert pair.answer(prompt_tokens=PROMPT, **fields).token_ids == whole.token_ids


def test_hand_over_continues_answer_with_form(pair: Pair) -> None:
    fields: dict[str, Any] = {"structured": FORMS[0], "max_tokens": 60, "ignore_eos": False}
    whole = pair.answer(prompt_tokens=PROMPT, **fields)
    tokens, chars = places(whole)[1]
    prefilled, decoded = pair.run(
        handed_over(
            pair.producer,
            pair.consumer,
            [*PROMPT, *whole.token_ids[:tokens]],
            prior_tokens=tokens,
            prior_chars=chars,
            **fields,
        )
    )
    assert prefilled.token_ids == whole.token_ids[tokens : tokens + 1]
    assert decoded.token_ids == whole.token_ids[tokens:]


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.2, "min_tokens": 30, "ignore_eos": False},
        {"frequency_penalty": -0.8, "repetition_penalty": 1.2},
        {"repetition_penalty": 1.4},
        {"bad_words": ("the", "of")},
        {"presence_penalty": 0.5, "structured": FORMS[1], "ignore_eos": False},
    ],
    ids=str,
)
def test_penalized_answer_continues(pair: Pair, fields: dict[str, Any]) -> None:
    whole = pair.answer(prompt_tokens=PROMPT, max_tokens=48, **fields)
    assert_same_everywhere(pair, whole, max_tokens=48, **fields)


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 20])
def test_answer_with_stop_strings_continues(
    pair: Pair, include_stop: bool, min_tokens: int
) -> None:
    """Also if the place is within a stop string."""
    text = pair.answer(prompt_tokens=PROMPT, max_tokens=40).text
    middle = len(text) * 2 // 3
    for stop in (text[middle : middle + 9], text[middle : middle + 9] + "#", text[-3:] + "#"):
        fields: dict[str, Any] = {
            "max_tokens": 40,
            "stop": (stop,),
            "include_stop": include_stop,
            "min_tokens": min_tokens,
        }
        whole = pair.answer(prompt_tokens=PROMPT, **fields)
        assert (whole.last.finish_reason == "stop") == ("#" not in stop)
        assert_same_everywhere(pair, whole, **fields)


def test_stop_string_in_prior_text_ends_answer(pair: Pair) -> None:
    """The earlier engine found it, and could not report the end."""
    plain = pair.answer(prompt_tokens=PROMPT, max_tokens=40)
    middle = len(plain.text) // 2
    fields: dict[str, Any] = {"max_tokens": 40, "stop": (plain.text[middle : middle + 6],)}
    whole = pair.answer(prompt_tokens=PROMPT, **fields)
    (rest,) = rests(pair, [(len(whole.token_ids), 3)], whole, **fields)
    assert (rest.token_ids, rest.text) == ([], whole.text[3:])
    assert rest.last.stop_reason == whole.last.stop_reason
