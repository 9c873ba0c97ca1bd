"""What a schema and a pattern are checked for."""

import json
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

from streams.calls.request.checks import breaks, json_schema, regex, structural_tag

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
QUADRATIC = {"$schema": DRAFT_4, "enum": [{"a": i} for i in range(2_000)]}


def test_json_schema_check_uses_fixed_meta_schema() -> None:
    """A draft 4 schema must not be compared with itself, value by value."""
    assert json_schema(json.dumps({"$schema": DRAFT_4, "type": "object"})) == ""
    assert json_schema(json.dumps({"items": [{"type": "string"}]})) == "", "as in draft 7"
    assert "not a valid JSON schema at type" in json_schema('{"type": 7}')
    assert "not a valid JSON schema" in json_schema('{"$schema": []}')
    before_s = time.process_time()
    assert json_schema(json.dumps(QUADRATIC)) == ""
    assert time.process_time() - before_s < 1
    assert regex("[a-z]+") == ""
    assert regex("(") != ""


TAG = {"type": "tag", "begin": "<f>", "content": {"type": "any_text"}, "end": "</f>"}


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG]}, ""),
        ({"type": "triggered_tags", "triggers": ["<g"], "tags": [TAG]}, "one trigger that begins"),
        ({"type": "triggered_tags", "triggers": ["<", "<f"], "tags": [TAG]}, "one trigger that"),
        ({"type": "regex", "pattern": "("}, "regex: not a regular expression"),
        ({"type": "regex", "pattern": "\\p{L}"}, ""),
        ({"type": "json_schema", "json_schema": {"type": "poem"}}, "not a valid JSON schema at"),
        ({"type": "star", "content": {"type": "json_schema", "json_schema": True}}, ""),
        ("any_text", "an object as format"),
    ],
)
def test_structural_tag_check_covers_parts(form: object, why: str) -> None:
    answer = structural_tag(json.dumps({"type": "structural_tag", "format": form}))
    assert why in answer and bool(answer) == bool(why)


def test_structural_tag_check_limits_nesting() -> None:
    form: object = {"type": "any_text"}
    for _ in range(100):
        form = {"type": "star", "content": form}
    answer = structural_tag(json.dumps({"type": "structural_tag", "format": form}))
    assert answer == "expected at most 80 levels of objects and lists"


@pytest.mark.skipif(find_spec("xgrammar") is None, reason="xgrammar comes with vLLM")
def test_structural_tag_check_knows_shape() -> None:
    unended = {"type": "tag", "begin": "<f>", "content": {"type": "any_text"}}
    answer = structural_tag(json.dumps({"type": "structural_tag", "format": unended}))
    assert answer == "format.tag.end: Field required"
    part = {"begin": "<f>", "schema": {}, "end": "</f>"}
    assert structural_tag(json.dumps({"structures": [part], "triggers": ["<f"]})) == ""
    del part["begin"]
    answer = structural_tag(json.dumps({"structures": [part], "triggers": ["<f"]}))
    assert answer == "format.triggered_tags.tags.0.begin: Field required"


@pytest.mark.usefixtures("recursion_limit")
@pytest.mark.parametrize(
    ("schema", "text", "why"),
    [
        ({"type": "integer"}, "7", ""),
        ({"type": "integer"}, '"7"', "is not of type 'integer'"),
        ({}, "{", "Expecting property name"),
        ({}, "NaN", "NaN is no JSON"),
        ({}, "[" * 9_000, "recursion"),
        ({"items": [{"type": "string"}]}, "[7]", "is not of type 'string'"),  # of draft 7
        ({"prefixItems": [{"type": "string"}]}, "[7]", "is not of type 'string'"),
        ({"$ref": "http://127.0.0.1:9/schema.json"}, "7", "Unresolvable"),
        ({"$ref": "#"}, "7", "recursion"),
        ({"enum": ["x" * 9_000]}, '"x"', "is not one of"),
    ],
)
def test_breaks_names_first_violation_of_schema(schema: object, text: str, why: str) -> None:
    error = breaks(json.dumps(schema), text)
    assert (error == "") == (why == "") and why in error and len(error) <= 1_000


def test_schema_check_reads_no_references(tmp_path: Path) -> None:
    """A reference would reveal local files and hosts of the network."""
    (tmp_path / "schema.json").write_text('{"type": "string"}')
    with warnings.catch_warnings():  # here they are errors, in that process not
        warnings.simplefilter("ignore")
        error = breaks(json.dumps({"$ref": (tmp_path / "schema.json").as_uri()}), "7")
    assert "Unresolvable" in error
