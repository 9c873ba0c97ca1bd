"""Encodes records to Avro bodies with one generated function for each record schema.

A writer that walks the schema with each value looks up every field's type again: it took five times
as long, a fifth of a router's CPU time. The bytes are the same. A value that does not fit the
schema raises any of `REFUSALS`; `schemas/codec.py` adds the record's name.
"""

from collections.abc import Callable, Iterable
from struct import Struct, error
from typing import Any

Schema = dict[str, Any]
Encode = Callable[[Any], bytes]
REFUSALS = (ValueError, TypeError, OverflowError, AttributeError, KeyError, error)
_LONG_MAX = 1 << 63
_KNOWN_MAX = 1 << 14


def long_of(value: int) -> bytes:
    """Return the bytes of a 64-bit number: zigzag, seven bits in a byte, the lowest first.

    Converts first, because shifts would overflow numbers of other libraries in their own width;
    fractions are truncated, as in fastavro. `int` would also accept texts.
    """
    value = value.__int__()
    if not -_LONG_MAX <= value < _LONG_MAX:
        raise OverflowError(f"expected a number of 64 bits, found {value}")
    zigzag, parts = (value << 1) ^ (value >> 63), bytearray()
    while zigzag > 0x7F:
        parts.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    parts.append(zigzag)
    return bytes(parts)


_KNOWN = {value: long_of(value) for value in range(-1, _KNOWN_MAX)}


def _long(value: int) -> bytes:
    return _KNOWN.get(value) or long_of(value)


def _longs(values: Iterable[int]) -> bytes:
    try:
        return b"".join(map(_KNOWN.__getitem__, values))
    except KeyError:
        return b"".join(map(_long, values))


def _raw(value: Any) -> bytes:
    raw = value if type(value) is bytes else bytes(memoryview(value))
    return _long(len(raw)) + raw


def _text(value: str) -> bytes:
    raw = value.encode()
    return _long(len(raw)) + raw


_SIMPLE = {"string": "text", "bytes": "raw", "double": "double", "int": "long", "long": "long"}


class _Source:
    """The source text of functions, and the names that it uses."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {
            "double": Struct("<d").pack,
            "known": _KNOWN.get,
            "long": _long,
            "long_of": long_of,
            "longs": _longs,
            "raw": _raw,
            "text": _text,
        }
        self.functions: list[str] = []
        self._types: dict[str, Any] = {}
        self._records: dict[str, str] = {}
        self._name_count = 0

    def _new(self, kind: str) -> str:
        self._name_count += 1
        return f"{kind}_{self._name_count}"

    def bytes_of(self, node: Any, value: str) -> str:
        """Return an expression for the bytes of the value of another expression."""
        node = self._types.get(node, node) if isinstance(node, str) else node
        if isinstance(node, list):
            assert node[0] == "null" and len(node) == 2, f'expected ["null", one], found {node}'
            at, inner = self._new("value"), node[1]
            there = f"b'\\2' + {self.bytes_of(inner, at)}"
            return f"(b'\\0' if ({at} := {value}) is None else {there})"
        if isinstance(node, str):
            return self._simple(node, value)
        if node["type"] == "enum":
            symbols = self._new("symbols")
            self._types[f"trivium.{node['name']}"] = node
            self.names[symbols] = {name: _long(at) for at, name in enumerate(node["symbols"])}
            return f"{symbols}[{value}]"
        if node["type"] == "record":
            return f"{self.record(node)}({value})"
        at = self._new("value")
        if node["type"] == "map":
            item = self._function(node["values"])
            items = f"b''.join([text(name) + {item}(each) for name, each in {at}.items()])"
        elif node["items"] in ("int", "long"):
            items = f"longs({at})"
        else:
            items = f"b''.join(map({self._function(node['items'])}, {at}))"
        return f"(long(len({at})) + {items} + b'\\0' if len({at} := {value}) else b'\\0')"

    def _simple(self, node: str, value: str) -> str:
        if node == "boolean":
            return f"(b'\\1' if {value} else b'\\0')"
        if node in ("int", "long"):  # most numbers are small
            at = self._new("value")
            return f"(known({at} := {value}) or long_of({at}))"
        return f"{_SIMPLE[node]}({value})"

    def _function(self, node: Any) -> str:
        if isinstance(node, str) and node in _SIMPLE:
            return _SIMPLE[node]
        name = self._new("item")
        self.functions.append(f"def {name}(value):\n return {self.bytes_of(node, 'value')}")
        return name

    def record(self, node: Schema) -> str:
        """Return the name of a record's function; write the function at the first call."""
        full = f"trivium.{node['name']}"
        if full not in self._records:
            self._types[full], self._records[full] = node, self._new("record")
            parts = [self.bytes_of(field["type"], f"r.{field['name']}") for field in node["fields"]]
            function = f"def {self._records[full]}(r):\n return b''.join([{', '.join(parts)}])"
            self.functions.append(function)
        return self._records[full]


def encoder_of(schema: Schema) -> Encode:
    """Return a record's encoder; the schema must define each named type at its first use."""
    source = _Source()
    name = source.record(schema)
    exec("\n".join(source.functions), source.names)
    encode: Encode = source.names[name]
    return encode
