"""The generated classes are what schemas/avro says: names, order, types and defaults of fields."""

import dataclasses
import enum
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from schemas import records
from schemas.codec import AVRO_DIR, full_schema, record_names
from tests.schemas.examples import ENUMS, RECORDS, class_of

PLAIN = {"string": str, "bytes": bytes, "int": int, "long": int, "double": float, "boolean": bool}


def hint_of(node: Any) -> Any:
    """The type annotation that a schema node calls for."""
    match node:
        case str():
            return PLAIN.get(node) or class_of(node)
        case {"type": "record" | "enum", "name": name}:
            return class_of(name)
        case {"type": "array", "items": items}:
            return Sequence[hint_of(items)]  # type: ignore[misc]  # built at run time
        case {"type": "map", "values": values}:
            return Mapping[str, hint_of(values)]  # type: ignore[misc]  # built at run time
        case ["null", inner]:
            return hint_of(inner) | None
    raise AssertionError(f"no annotation for {node}")


def default_of(field: dict[str, Any], hint: Any) -> Any:
    """The schema's default as the dataclass should hold it."""
    default = field["default"]
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return hint(default)
    if hint is bytes:
        return default.encode("latin-1")
    return () if default == [] else default


def read(name: str) -> dict[str, Any]:
    return typing.cast(dict[str, Any], json.loads((AVRO_DIR / f"trivium.{name}.avsc").read_text()))


def test_every_schema_has_record_class() -> None:
    classes = {
        name
        for name, value in vars(records).items()
        if isinstance(value, type) and value.__module__ == records.__name__
    }
    assert classes == set(record_names())


@pytest.mark.parametrize("name", RECORDS)
def test_record_fields_match_schema(name: str) -> None:
    schema, cls = read(name), class_of(name)
    hints = typing.get_type_hints(cls)
    assert [f["name"] for f in schema["fields"]] == [f.name for f in dataclasses.fields(cls)]
    for field in schema["fields"]:
        assert hints[field["name"]] == hint_of(field["type"]), field["name"]


@pytest.mark.parametrize("name", RECORDS)
def test_record_defaults_match_schema(name: str) -> None:
    schema, cls = read(name), class_of(name)
    hints = typing.get_type_hints(cls)
    for field, ours in zip(schema["fields"], dataclasses.fields(cls), strict=True):
        missing = ours.default is ours.default_factory is dataclasses.MISSING
        assert ("default" not in field) == missing, field["name"]
        if missing:
            continue
        factory = ours.default_factory
        value = ours.default if factory is dataclasses.MISSING else factory()
        expected = default_of(field, hints[field["name"]])
        assert (value, type(value)) == (expected, type(expected)), field["name"]


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_slotted_and_keyword_only(name: str) -> None:
    """The type checker rejects changes of a record (`tests/schemas/test_frozen.py`)."""
    cls = class_of(name)
    assert hasattr(cls, "__slots__")
    assert all(field.kw_only for field in dataclasses.fields(cls))


@pytest.mark.parametrize("name", ENUMS)
def test_enum_members_match_schema(name: str) -> None:
    schema = read(name)
    assert [member.value for member in class_of(name)] == schema["symbols"]
    assert schema["default"] == schema["symbols"][0], "unknown symbols must read as the first one"


@pytest.mark.parametrize("name", record_names())
def test_schemas_and_fields_have_documentation(name: str) -> None:
    schema = read(name)
    assert schema["namespace"] == "trivium" and schema["name"] == name
    for part in (schema, *schema.get("fields", ())):
        assert part["doc"].strip(), part["name"]


def test_full_schema_writes_named_types_once() -> None:
    text = json.dumps(full_schema("Work"))
    assert text.count('"name": "Sampling"') == 1
    assert text.count('"name": "StructuredKind"') == 1
