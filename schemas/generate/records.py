"""Generates `schemas/records.py` from `schemas/avro`: one dataclass or enum for each schema file.

The schemas are the only source; `make schemas` writes the classes, and a test fails when they are
stale. Nothing else calls this, and it imports nothing that it writes.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any

SCHEMAS = Path(__file__).parents[1]
AVRO_DIR, RECORDS_FILE = SCHEMAS / "avro", SCHEMAS / "records.py"
LINE_MAX, INDENT = 100, "    "
Schema = dict[str, Any]

_HEAD = '''"""The records that cross Kafka, as frozen dataclasses, and their enums.

Generated from `schemas/avro` by `make schemas`; never edited. Nothing here encodes, decodes or
validates (`schemas/codec.py` does).
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum

from schemas.frozen import frozen
'''
_PLAIN = {
    "string": "str",
    "bytes": "bytes",
    "int": "int",
    "long": "int",
    "float": "float",
    "double": "float",
    "boolean": "bool",
}


def schemas() -> dict[str, Schema]:
    """Return every schema by its full name, such as `trivium.Request`."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(AVRO_DIR.glob("*.avsc"))}


def records_text() -> str:
    """Return the whole module: enums first, then each record after the records that it contains."""
    by_name = schemas()
    enums = [name for name, schema in by_name.items() if schema["type"] == "enum"]
    classes = [_enum(by_name[name]) for name in enums]
    classes += [
        _record(by_name[name], by_name) for name in _parts_first(by_name) if name not in enums
    ]
    return "\n\n".join([_HEAD, *classes])


def _parts_first(by_name: dict[str, Schema]) -> list[str]:
    ordered: dict[str, None] = {}

    def add(name: str) -> None:
        for part in _named_in(by_name[name].get("fields", []), by_name):
            add(part)
        ordered.setdefault(name)

    for name in by_name:
        add(name)
    return list(ordered)


def _named_in(node: Any, by_name: dict[str, Schema]) -> Iterator[str]:
    """Yield our types that a part of a schema names."""
    if isinstance(node, str):
        yield from [node] if node in by_name else []
    elif isinstance(node, dict | list):
        children: Iterable[Any] = node.values() if isinstance(node, dict) else node
        for child in children:
            yield from _named_in(child, by_name)


def _enum(schema: Schema) -> str:
    members = [f'{INDENT}{symbol.upper()} = "{symbol}"\n' for symbol in schema["symbols"]]
    return f"class {schema['name']}(StrEnum):\n{_docstring(schema['doc'])}\n{''.join(members)}"


def _record(schema: Schema, by_name: dict[str, Schema]) -> str:
    fields = "".join(_field(field, by_name) for field in schema["fields"])
    head = f"@frozen\nclass {schema['name']}:\n"
    return f"{head}{_docstring(schema['doc'])}\n{fields}"


def _docstring(text: str) -> str:
    width = LINE_MAX - len(INDENT)
    if len(text) + 6 <= width:
        return f'{INDENT}"""{text}"""\n'
    lines = "".join(f"{INDENT}{line}\n" for line in wrap(f'"""{text}', width))
    return f'{lines}{INDENT}"""\n'


def _field(field: Schema, by_name: dict[str, Schema]) -> str:
    """Return a field with its documentation: after it, or above it if the line is too long."""
    code = f"{INDENT}{field['name']}: {_hint(field['type'])}"
    if "default" in field:
        code += f" = {_default(field['type'], field['default'], by_name)}"
    line = f"{code}  # {field['doc']}"
    if len(line) <= LINE_MAX:
        return f"{line}\n"
    above = wrap(field["doc"], LINE_MAX - len(INDENT) - 2)
    return "".join(f"{INDENT}# {part}\n" for part in above) + f"{code}\n"


def _hint(node: Any) -> str:
    match node:
        case str():
            return _PLAIN.get(node) or node.removeprefix("trivium.")
        case {"type": "array", "items": items}:
            return f"Sequence[{_hint(items)}]"
        case {"type": "map", "values": values}:
            return f"Mapping[str, {_hint(values)}]"
        case ["null", inner]:
            return f"{_hint(inner)} | None"
    raise ValueError(f"expected a type that records have, found {node}")


def _default(node: Any, default: Any, by_name: dict[str, Schema]) -> str:
    if default == {}:
        return "field(default_factory=dict)"
    if default == []:
        return "()"
    if isinstance(node, str) and node in by_name:
        return f"{_hint(node)}.{default.upper()}"
    if node == "bytes":
        return 'b""' if default == "" else repr(default.encode("latin-1"))
    return json.dumps(default) if isinstance(default, str) else repr(default)


if __name__ == "__main__":
    RECORDS_FILE.write_text(records_text())
