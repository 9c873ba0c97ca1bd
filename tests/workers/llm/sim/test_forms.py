"""Answers of the simulated engine whose form is constrained."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # ships no types

from schemas.records import Structured, StructuredKind
from tests.virtual_time import run_virtual
from tests.workers.llm.engines import (
    Answer,
    answered,
    collected,
    handed_over,
    job,
    prompt,
    start_sim,
)
from tests.workers.llm.sim.engine_pairs import closed
from workers.llm.sim.vocabulary import load_vocabulary

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "count": {"type": "integer"},
        "city": {"const": "Łódź"},
    },
    "required": ["name", "count", "city"],
    "additionalProperties": False,
}
FORM = Structured(kind=StructuredKind.JSON_SCHEMA, value=json.dumps(SCHEMA))
LONG: dict[str, Any] = {"structured": FORM, "max_tokens": 400}


def test_structured_answers_match_schema_and_stop() -> None:
    async def main() -> None:
        engine = await start_sim()
        jobs = [job(prompt(20, salt), **LONG, temperature=1.0, seed=salt) for salt in range(20)]
        answers = await collected(engine, *jobs)
        validator = Draft202012Validator(SCHEMA)
        assert all(validator.is_valid(json.loads(answer.text)) for answer in answers)
        assert {answer.last.finish_reason for answer in answers} == {"stop"}
        assert len({answer.text for answer in answers}) == len(answers)
        tokenizer = load_vocabulary("sim", 4_096).tokenizer
        for answer in answers:
            assert tokenizer.decode(answer.token_ids) == answer.text
        await closed(engine)

    run_virtual(main())


def test_max_tokens_cut_structured_answer() -> None:
    async def main() -> None:
        engine = await start_sim()
        whole = await answered(engine, job(prompt(20), **LONG))
        tokens = len(whole.token_ids)
        just = await answered(engine, job(prompt(20), **{**LONG, "max_tokens": tokens}))
        cut = await answered(engine, job(prompt(20), **{**LONG, "max_tokens": tokens - 2}))
        assert (just.text, just.last.finish_reason) == (whole.text, "stop")
        assert (cut.token_ids, cut.last.finish_reason) == (whole.token_ids[:-2], "length")
        assert whole.text.startswith(cut.text)
        await closed(engine)

    run_virtual(main())


def test_structured_answer_repeats_across_attempts_and_hand_over() -> None:
    async def main() -> None:
        first_engine, second_engine = await start_sim(), await start_sim()
        sampling: dict[str, Any] = {**LONG, "temperature": 0.7, "seed": 11}
        first = await answered(first_engine, job(prompt(40), **sampling))
        second = await answered(second_engine, job(prompt(40), **sampling))
        prefilled, decoded = await handed_over(first_engine, second_engine, prompt(40), **sampling)
        assert first.token_ids == second.token_ids == decoded.token_ids
        assert decoded.token_ids[:1] == prefilled.token_ids
        await closed(first_engine, second_engine)

    run_virtual(main())


def test_structured_answer_leaves_neighbours_unchanged() -> None:
    async def main() -> None:
        engine = await start_sim()
        alone = await answered(engine, job(prompt(30, 5), max_tokens=60))
        formed, beside = await collected(
            engine, job(prompt(20), **LONG), job(prompt(30, 5), max_tokens=60)
        )
        assert beside.token_ids == alone.token_ids
        assert json.loads(formed.text)
        await closed(engine)

    run_virtual(main())


def test_structured_answer_supports_stop_strings_and_logprobs() -> None:
    async def main() -> None:
        engine = await start_sim()
        whole = await answered(engine, job(prompt(20), **LONG, logprobs=2))
        entries = [entry for output in whole.outputs for entry in output.logprobs]
        assert [entry.token_id for entry in entries] == whole.token_ids
        assert "".join(entry.token for entry in entries[:-1]) == whole.text
        stopped = await answered(engine, job(prompt(20), **LONG, stop=('"count"',)))
        assert stopped.text == whole.text.partition('"count"')[0]
        assert stopped.last.stop_reason == '"count"'
        await closed(engine)

    run_virtual(main())


def test_engine_texts_match_structured_outputs() -> None:
    async def main() -> None:
        engine = await start_sim()
        answer = await answered(engine, job(prompt(20), **LONG))
        before: list[int] = []
        for output in answer.outputs:
            assert "".join(engine.texts(before, output)) == output.text
            before += output.token_ids
        await closed(engine)

    run_virtual(main())


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (StructuredKind.GRAMMAR, "root ::= 'a'"),
        (StructuredKind.REGEX, "("),
        (StructuredKind.JSON_SCHEMA, "{"),
        (StructuredKind.JSON_SCHEMA, '{"enum": []}'),
        (StructuredKind.CHOICE, "7"),
        (StructuredKind.CHOICE, '["\\ud800"]'),
    ],
)
def test_engine_rejects_invalid_structure(kind: StructuredKind, value: str) -> None:
    async def main() -> None:
        engine = await start_sim()
        form = Structured(kind=kind, value=value)
        answer: Answer = await answered(engine, job(prompt(20), structured=form))
        assert answer.error_code == "invalid_request"
        assert (await answered(engine, job(prompt(20)))).last.finish_reason == "length"
        await closed(engine)

    run_virtual(main())


def test_prefix_cache_holds_structured_answer_for_next_turn() -> None:
    async def main() -> None:
        engine, fresh_engine = await start_sim(), await start_sim()
        first = await answered(engine, job(prompt(20), **LONG))
        turn = [*prompt(20), *first.token_ids, *prompt(10, 3)]
        cached = await answered(engine, job(turn))
        fresh = await answered(fresh_engine, job(turn))
        assert cached.last.cached_tokens >= 32 > fresh.last.cached_tokens
        assert cached.token_ids == fresh.token_ids
        await closed(engine, fresh_engine)

    run_virtual(main())
