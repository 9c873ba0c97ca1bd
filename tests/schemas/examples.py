"""Instances of every record, made from the schemas: a fixed example, and Hypothesis strategies."""

import dataclasses
import enum
from typing import Any

from hypothesis import strategies as st

from schemas import records
from schemas.codec import full_schema, record_names

TRACEPARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
INT_MAX, LONG_MAX = 2**31 - 1, 2**63 - 1
RECORDS = [name for name in record_names() if dataclasses.is_dataclass(getattr(records, name))]
ENUMS = [name for name in record_names() if name not in RECORDS]


def class_of(name: str) -> Any:
    """The dataclass or enum of a schema name, with or without namespace."""
    return getattr(records, name.removeprefix("trivium."))


def example(node: Any, path: str = "x") -> Any:
    """The fixed instance of a schema node: every optional is set, every array holds two items."""
    match node:
        case str() if node.startswith("trivium."):
            return example(full_schema(node.removeprefix("trivium.")), path)
        case {"type": "record", "name": name, "fields": fields}:
            values = {f["name"]: example(f["type"], f["name"]) for f in fields}
            return class_of(name)(**values)
        case {"type": "enum", "name": name, "symbols": symbols}:
            return class_of(name)(symbols[-1])
        case {"type": "array", "items": items}:
            return (example(items, path), example(items, path + "_2"))
        case {"type": "map", "values": values}:
            return {path: example(values, path)}
        case ["null", inner]:
            return example(inner, path)
    number = len(path) * 1_000 + sum(path.encode())  # differs from field to field, never changes
    simple = {"int": number, "long": number << 20, "double": number / 8, "boolean": True}
    return {"string": f"{path} é", "bytes": path.encode() + b"\xff", **simple}[node]


_SIMPLE: dict[str, st.SearchStrategy[Any]] = {
    "string": st.text(max_size=20),
    "bytes": st.binary(max_size=20),
    "int": st.integers(-INT_MAX - 1, INT_MAX),
    "long": st.integers(-LONG_MAX - 1, LONG_MAX),
    "double": st.floats(allow_nan=False),
    "boolean": st.booleans(),
}


def instances(node: Any) -> st.SearchStrategy[Any]:
    """Any value of a schema node, as the dataclasses hold it."""
    match node:
        case str() if node.startswith("trivium."):
            return instances(full_schema(node.removeprefix("trivium.")))
        case {"type": "record", "name": name, "fields": fields}:
            return st.builds(class_of(name), **{f["name"]: instances(f["type"]) for f in fields})
        case {"type": "enum", "name": name}:
            members: type[enum.StrEnum] = class_of(name)
            return st.sampled_from(list(members))
        case {"type": "array", "items": items}:
            return st.lists(instances(items), max_size=3).map(tuple)
        case {"type": "map", "values": values}:
            return st.dictionaries(st.text(max_size=5), instances(values), max_size=3)
        case ["null", inner]:
            return st.none() | instances(inner)
    return _SIMPLE[node]
