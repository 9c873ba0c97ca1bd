"""Answers of the simulated engine whose form is constrained."""

import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # ships no types

from schemas.errors import InvalidRequest
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
from workers.llm.sim.forms.text import draw_text
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
        tokenizer = load_vocabulary("sim").tokenizer
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


ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "format": "uuid"},
        "state": {"enum": ["open", "shipped", None]},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "minItems": 1, "maxItems": 4},
        "note": {"type": ["string", "null"], "maxLength": 12},
        "paid": {"type": "boolean"},
    },
    "required": ["id", "state", "lines"],
    "additionalProperties": False,
    "$defs": {
        "line": {
            "type": "object",
            "properties": {
                "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                "count": {"type": "integer", "minimum": 1, "maximum": 9},
                "price": {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
            },
            "required": ["sku", "count", "price"],
        }
    },
}
SCHEMAS: list[Any] = [
    ORDER,
    {},
    {"type": "object"},
    {"type": "object", "minProperties": 3, "additionalProperties": {"type": "integer"}},
    {"required": ["a", "b"]},
    {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
     "required": ["next"]},
    {"oneOf": [{"type": "string", "minLength": 30}, {"type": "integer", "maximum": -5}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 4}, {"multipleOf": 2}]},
    {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]},
               {"properties": {"a": {"minimum": 7}, "b": {"const": "x"}}, "required": ["b"]}]},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}], "items": False},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 5}, "uniqueItems": True,
     "minItems": 3},
    {"type": "number", "multipleOf": 0.5},
    {"type": "integer", "exclusiveMinimum": 4, "exclusiveMaximum": 6},
    {"type": "string", "enum": ["Zürich", "漢字", "a\nb"]},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "properties": {"a": {}, "b": {}}},
    {"type": "object", "properties": {"kind": {"not": {"const": "x"}}}, "required": ["kind"]},
]  # fmt: skip
PATTERNS = [
    r"[A-Z]{2,4}-\d+(\.\d{1,2})?", r"^(red|green|blue)$", r"[^a-z ]{3}\s\S\w\W\D",
    r"(?i:yes|no)", r"a*?b+?.", "", r"\u00e9{2}", r"[\w.]+@[\w]+\.(com|org)", r"(a|b){0,2}[^\d]",
]  # fmt: skip


def schema_form(value: Any) -> Structured:
    return Structured(kind=StructuredKind.JSON_SCHEMA, value=json.dumps(value))


@pytest.mark.parametrize(
    "json_schema", SCHEMAS, ids=lambda json_schema: json.dumps(json_schema)[:60]
)
def test_form_text_satisfies_schema_and_repeats_by_seed(json_schema: Any) -> None:
    validator = Draft202012Validator(json_schema)
    texts = [draw_text(schema_form(json_schema), seed) for seed in range(200)]
    assert [
        error.message for text in texts for error in validator.iter_errors(json.loads(text))
    ] == []
    assert texts == [draw_text(schema_form(json_schema), seed) for seed in range(200)]


def test_form_text_varies_by_seed() -> None:
    assert len({draw_text(schema_form(ORDER), seed) for seed in range(100)}) > 95


@pytest.mark.parametrize("pattern", PATTERNS)
def test_form_text_matches_pattern(pattern: str) -> None:
    form = Structured(kind=StructuredKind.REGEX, value=pattern)
    for seed in range(200):
        assert re.fullmatch(pattern, draw_text(form, seed))


@pytest.mark.parametrize("name", ["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid"])
def test_form_text_matches_string_format(name: str) -> None:
    validator = Draft202012Validator(
        {"format": name}, format_checker=Draft202012Validator.FORMAT_CHECKER
    )
    for seed in range(50):
        text = draw_text(schema_form({"type": "string", "format": name}), seed)
        assert validator.is_valid(json.loads(text)), text


def test_form_text_covers_choices_and_json_objects() -> None:
    choice = Structured(kind=StructuredKind.CHOICE, value='["red", "grün"]')
    assert {draw_text(choice, seed) for seed in range(50)} == {"red", "grün"}
    some = Structured(kind=StructuredKind.JSON_OBJECT, value="")
    assert all(json.loads(draw_text(some, seed)) for seed in range(50))
    assert isinstance(json.loads(draw_text(some, 1)), dict)


EVIL = {"a": {"oneOf": [{"$ref": "#/$defs/b"}] * 9}, "b": {"oneOf": [{"$ref": "#/$defs/c"}] * 9},
        "c": {"oneOf": [{"$ref": "#/$defs/d"}] * 9}, "d": {"oneOf": [{"$ref": "#/$defs/e"}] * 9},
        "e": {"oneOf": [{"type": "string"}] * 9}}  # fmt: skip


@pytest.mark.parametrize(
    "json_schema",
    [
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"$ref": "https://elsewhere.example/schema"},
        {"$ref": "#/nowhere"},
        {"$ref": "#"},
        {"enum": []},
        {"not": {}},
        {"type": "array", "minItems": 100_000},
        {"type": "string", "minLength": 1_000_000},
        {"patternProperties": {"(a+)+$": {"type": "string"}}},
        {"$defs": EVIL, "$ref": "#/$defs/a"},
        {"type": "string", "pattern": "(?=x)y"},
    ],
    ids=lambda json_schema: json.dumps(json_schema)[:60],
)
def test_form_rejects_unsupported_schema(json_schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="simulated engine"):
        draw_text(schema_form(json_schema), 1)


@pytest.mark.parametrize(
    "pattern", ["(", r"(a)\1", r"a\bb", "(?!a)b", "a^b", "a$b", "(a{1000}){1000}", r"[^\w\W]"]
)
def test_form_rejects_unsupported_pattern(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="simulated engine"):
        draw_text(Structured(kind=StructuredKind.REGEX, value=pattern), 1)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [('root ::= "a" | "b" root', "b*a"), ("start: /[a-z]+/ NL\nNL: /\\n/", "[a-z]+\n")],
)
def test_form_text_follows_grammar(grammar: str, pattern: str) -> None:
    form = Structured(kind=StructuredKind.GRAMMAR, value=grammar)
    assert all(re.fullmatch(pattern, draw_text(form, seed)) for seed in range(50))


@pytest.mark.parametrize("grammar", ["root ::= 'a'", "root ::= root root"])
def test_form_rejects_grammar_without_text(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="simulated engine"):
        draw_text(Structured(kind=StructuredKind.GRAMMAR, value=grammar), 1)
