"""Answers of allowed tokens only, on every engine."""

from typing import Any

import pytest

from schemas.records import Structured, StructuredKind
from tests.workers.llm.engine_pair import Pair
from tests.workers.llm.engines import end_id, handed_over
from tests.workers.llm.engines import prompt as make_prompt

FORM = Structured(kind=StructuredKind.CHOICE, value='["a", "b"]')


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answer_has_only_allowed_tokens(pair: Pair, temperature: float) -> None:
    """The end of sequence is not among them, so the answer is as long as it may be."""
    fields: dict[str, Any] = {
        **{"allowed_token_ids": (40, 50, 60), "max_tokens": 24},
        **{"temperature": temperature, "seed": 3, "ignore_eos": False},
    }
    whole = pair.answer(**fields)
    assert whole.last.finish_reason == "length"
    assert len(whole.token_ids) == 24 and set(whole.token_ids) <= {40, 50, 60}
    assert pair.answer(**fields).token_ids == whole.token_ids
    prefilled, decoded = pair.run(
        handed_over(pair.producer, pair.consumer, make_prompt(40), **fields)
    )
    assert [*prefilled.token_ids, *decoded.token_ids[1:]] == whole.token_ids
    behind = [*make_prompt(40), *whole.token_ids[:9]]
    rest = pair.answer(prompt_tokens=behind, prior_tokens=9, **fields)
    assert set(rest.token_ids) <= {40, 50, 60} and len(rest.token_ids) == 24 - 9
    if not temperature:
        assert rest.token_ids == whole.token_ids[9:]


def test_answer_of_end_alone_is_empty(pair: Pair) -> None:
    end = end_id(pair.consumer)
    answer = pair.answer(allowed_token_ids=(end,), ignore_eos=False)
    assert (answer.token_ids, answer.text, answer.last.finish_reason) == ([end], "", "stop")
    endless = pair.answer(allowed_token_ids=(end,), max_tokens=5)
    assert (endless.token_ids, endless.last.finish_reason) == ([end] * 5, "length")


def test_form_and_allowed_tokens_both_hold(pair: Pair) -> None:
    form: dict[str, Any] = {"structured": FORM, "temperature": 1.0, "ignore_eos": False}
    answers = [pair.answer(seed=seed, **form) for seed in range(20)]
    ids = {answer.text: answer.token_ids for answer in answers}
    assert ids.keys() == {"a", "b"}
    end = end_id(pair.consumer)
    for text in ids:
        allowed = tuple({*ids[text], end, 40})
        for seed in range(5):
            answer = pair.answer(seed=seed, allowed_token_ids=allowed, **form)
            assert (answer.text, answer.last.finish_reason) == (text, "stop")


def test_engine_outlives_form_without_allowed_token(pair: Pair) -> None:
    """The gateway cannot tell; the request fails, and the engine goes on."""
    answer = pair.answer(structured=FORM, allowed_token_ids=(40,), ignore_eos=False)
    assert answer.last.finish_reason == "error"
    assert pair.answer(max_tokens=3).last.finish_reason == "length"


def test_engine_refuses_token_beyond_vocabulary(pair: Pair) -> None:
    answer = pair.answer(allowed_token_ids=(9, 999_999))
    assert (answer.last.finish_reason, answer.error_code) == ("error", "invalid_request")
