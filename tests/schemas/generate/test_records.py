"""The generator of records: the committed module is current, and each kind of field as Python."""

from typing import Any

import pytest

from schemas.generate import records
from schemas.generate.records import RECORDS_FILE, records_text


def test_committed_records_module_is_current() -> None:
    assert RECORDS_FILE.read_text() == records_text(), "run `make schemas`; commit it"


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"type": "string"}, "x: str  # what it is"),
    ({"type": "string", "default": "a"}, 'x: str = "a"  # what it is'),
    ({"type": "long", "default": 3}, "x: int = 3  # what it is"),
    ({"type": "double", "default": -1.0}, "x: float = -1.0  # what it is"),
    ({"type": "boolean", "default": False}, "x: bool = False  # what it is"),
    ({"type": "bytes", "default": ""}, 'x: bytes = b""  # what it is'),
    ({"type": "trivium.Kind", "default": "one"}, "x: Kind = Kind.ONE  # what it is"),
    ({"type": ["null", "trivium.Part"], "default": None}, "x: Part | None = None  # what it is"),
    (
        {"type": {"type": "array", "items": "trivium.Part"}, "default": []},
        "x: Sequence[Part] = ()  # what it is",
    ),
    (
        {"type": {"type": "map", "values": "double"}, "default": {}},
        "x: Mapping[str, float] = field(default_factory=dict)  # what it is",
    ),
]
KIND = {"type": "enum", "name": "Kind", "doc": "A kind.", "symbols": ["one", "two"]}


def part(**field: Any) -> dict[str, Any]:
    described = {"name": "x", "doc": "what it is", **field}
    return {"type": "record", "name": "Part", "doc": "A part.", "fields": [described]}


@pytest.mark.parametrize(("field", "expected"), FIELDS, ids=[line for _, line in FIELDS])
def test_generator_writes_field_of_every_type(
    monkeypatch: pytest.MonkeyPatch, field: dict[str, Any], expected: str
) -> None:
    definitions = {
        "trivium.Kind": KIND,
        "trivium.Whole": part(**field),
        "trivium.Part": part(type="int"),
    }
    monkeypatch.setattr(records, "schemas", lambda: definitions)
    assert f'"""A part."""\n\n    {expected}\n' in records_text()


def test_generator_writes_parts_before_record_that_uses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = {**part(type={"type": "array", "items": "trivium.Part"}), "name": "Whole"}
    definitions = {
        "trivium.Whole": whole,
        "trivium.Part": part(type="trivium.Kind"),
        "trivium.Kind": KIND,
    }
    monkeypatch.setattr(records, "schemas", lambda: definitions)
    text = records_text()
    assert 'class Kind(StrEnum):\n    """A kind."""\n\n    ONE = "one"\n    TWO = "two"\n' in text
    assert text.index("class Kind") < text.index("class Part") < text.index("class Whole")


def test_generator_rejects_unsupported_type(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = {"type": "fixed", "size": 8, "name": "F"}
    monkeypatch.setattr(records, "schemas", lambda: {"trivium.Part": part(type=fixed)})
    with pytest.raises(ValueError, match="expected a type that records have, found .*fixed"):
        records_text()


def test_generator_writes_long_documentation_above_field() -> None:
    long = "one two three four " * 8
    text = records._field({"name": "x", "type": "int", "doc": long.strip()}, {})
    assert text.startswith("    # one two") and text.endswith("\n    x: int\n")
    assert max(map(len, text.splitlines())) <= records.LINE_MAX
