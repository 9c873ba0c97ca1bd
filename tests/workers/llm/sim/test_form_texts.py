"""Texts of a form are valid; a seed gives the same again, another one another."""

import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # ships no types

from schemas.errors import InvalidRequest
from schemas.records import Structured, StructuredKind
from workers.llm.sim.forms import draw_text

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


def schema(value: Any) -> Structured:
    return Structured(kind=StructuredKind.JSON_SCHEMA, value=json.dumps(value))


@pytest.mark.parametrize(
    "json_schema", SCHEMAS, ids=lambda json_schema: json.dumps(json_schema)[:60]
)
def test_form_text_satisfies_schema_and_repeats_by_seed(json_schema: Any) -> None:
    validator = Draft202012Validator(json_schema)
    texts = [draw_text(schema(json_schema), seed) for seed in range(200)]
    assert [
        error.message for text in texts for error in validator.iter_errors(json.loads(text))
    ] == []
    assert texts == [draw_text(schema(json_schema), seed) for seed in range(200)]


def test_form_text_varies_by_seed() -> None:
    assert len({draw_text(schema(ORDER), seed) for seed in range(100)}) > 95


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
        text = draw_text(schema({"type": "string", "format": name}), seed)
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
        draw_text(schema(json_schema), 1)


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
