"""What a schema and a pattern are checked for."""

import json
import time
import warnings
from pathlib import Path

import pytest

from streams.calls.request.checks import breaks, json_schema, regex

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
