"""Generates a value for a JSON schema from random numbers. Pure.

It supports the usual keywords of schemas for answers: types, properties, items, bounds, formats,
patterns, enumerations, `$ref` within the schema, `anyOf`, `oneOf`, `allOf`. It does not check the
value; a validator in `form.py` does.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from schemas.errors import InvalidRequest
from workers.llm.sim.forms import pattern
from workers.models.sim import WORDS

VALUES_MAX = 2_000  # values of one answer, with the branches and references on the way to them
_DEPTH = 5  # from this depth on, only required properties and items
_OPTIONAL = 0.7  # share of the optional properties that are generated
_ITEMS = 3  # items beyond the required ones
_SPAN = 100  # range of numbers with one bound or none
_BY_KEYWORD = {
    "properties": "object", "required": "object", "additionalProperties": "object",
    "items": "array", "prefixItems": "array", "minItems": "array", "pattern": "string",
    "minLength": "string", "maxLength": "string", "format": "string", "minimum": "number",
    "maximum": "number", "exclusiveMinimum": "number", "multipleOf": "number",
}  # fmt: skip
_FORMATS: Mapping[str, str] = {
    "date": r"20[0-4]\d-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])",
    "time": r"([01]\d|2[0-3]):[0-5]\d:[0-5]\dZ",
    "date-time": r"20[0-4]\d-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])T([01]\d|2[0-3]):[0-5]\d:[0-5]\dZ",
    "duration": r"P[1-9]D",
    "email": r"[a-z]{4,8}@[a-z]{4,8}\.org",
    "hostname": r"[a-z]{4,8}\.[a-z]{4,8}\.org",
    "ipv4": r"10\.\d\.\d\.[1-9]\d",
    "ipv6": r"fd00::[1-9a-f][0-9a-f]{3}",
    "uri": r"https://[a-z]{4,8}\.org/[a-z]{4,8}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
}


class SchemaValues:
    """Values of one schema from one random generator."""

    def __init__(self, schema: Any, rng: random.Random) -> None:
        self._root, self._rng = schema, rng
        self._values_left = VALUES_MAX
        self._kinds: Mapping[str, Callable[[Mapping[str, Any], int], Any]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
            "boolean": lambda *_: rng.random() < 0.5,
            "null": lambda *_: None,
        }

    def draw(self) -> Any:
        """Return one value of the whole schema; raises InvalidRequest if there is none."""
        return self._value(self._root, 0)

    def _value(self, schema: Any, depth: int) -> Any:
        schema = self._flatten(schema, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._rng.choice(schema["enum"]) if schema["enum"] else _nothing("enum")
        kinds = schema.get("type")
        if isinstance(kinds, list):
            kinds = self._rng.choice(kinds)
        if kinds is None:
            kinds = next((_BY_KEYWORD[key] for key in schema if key in _BY_KEYWORD), "string")
        return self._kinds[kinds](schema, depth)

    def _flatten(self, schema: Any, depth: int) -> dict[str, Any]:
        """Return the schema without references, branches and conjunctions."""
        self._values_left -= 1
        if self._values_left < 0 or schema is False:
            _nothing("it" if schema is False else "so large a schema")
        if schema is True:
            return {}
        flat = {key: value for key, value in schema.items() if key not in _COMBINING}
        for reference in (schema[key] for key in ("$ref", "$dynamicRef") if key in schema):
            flat = _merge(flat, self._flatten(self._resolve(reference), depth))
        for part in schema.get("allOf", ()):
            flat = _merge(flat, self._flatten(part, depth))
        for branches in (schema[key] for key in ("anyOf", "oneOf") if key in schema):
            flat = _merge(flat, self._flatten(self._branch(branches, depth), depth))
        return flat

    def _branch(self, branches: Sequence[Any], depth: int) -> Any:
        if depth >= _DEPTH:  # branches with references may recurse
            branches = sorted(branches, key=lambda branch: "$ref" in str(branch))[:1]
        return self._rng.choice(branches)

    def _resolve(self, reference: str) -> Any:
        if not reference.startswith("#"):
            raise InvalidRequest(
                f"the simulated engine follows references within a schema alone, found {reference}"
            )
        target = self._root
        for step in reference[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(step)] if isinstance(target, list) else target[step]
            except (KeyError, ValueError, IndexError, TypeError):
                _nothing(reference)
        return target

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = schema.get("required", ())
        extra_schema = schema.get("additionalProperties", True)
        share = _OPTIONAL if depth < _DEPTH else 0.0
        names = [name for name in properties if name in required or self._rng.random() < share]
        names += [name for name in required if name not in properties]
        count_min = schema.get("minProperties", 0 if properties or extra_schema is False else 1)
        for name in [name for name in properties if name not in names][
            : max(0, count_min - len(names))
        ]:
            names.append(name)
        while len(names) < count_min and extra_schema is not False:
            names.append(f"{self._rng.choice(WORDS)}_{len(names)}")
        return {name: self._value(properties.get(name, extra_schema), depth + 1) for name in names}

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        items = schema.get("items", True)
        firsts = schema.get("prefixItems", items if isinstance(items, list) else [])
        extra_schema = schema.get("additionalItems", True) if isinstance(items, list) else items
        count_min = schema.get("minItems", 0)
        extra = self._rng.randint(0, _ITEMS) if depth < _DEPTH else 0
        count_max = schema.get("maxItems", max(count_min, len(firsts)) + _ITEMS)
        count = min(
            max(count_min, extra, len(firsts)), count_max, *[len(firsts)] * (extra_schema is False)
        )
        if count > VALUES_MAX:
            _nothing("so long an array")
        values: list[Any] = []
        for place in range(count):
            item_schema = firsts[place] if place < len(firsts) else extra_schema
            value = self._value(item_schema, depth + 1)
            if schema.get("uniqueItems") and value in values and place >= count_min:
                break
            values.append(value)
        return values

    def _string(self, schema: Mapping[str, Any], _: int) -> str:
        expression = schema.get("pattern") or _FORMATS.get(schema.get("format", ""))
        if expression:
            return pattern.draw(expression, self._rng)
        length_min = int(schema.get("minLength", 1))
        if length_min > pattern.CHARS_MAX:
            _nothing("so long a text")
        text = " ".join(self._rng.choice(WORDS) for _ in range(self._rng.randint(1, 4)))
        while len(text) < length_min:
            text += " " + self._rng.choice(WORDS)
        return text[: int(schema.get("maxLength", len(text)))]

    def _bounds(self, schema: Mapping[str, Any], step: float) -> tuple[float, float]:
        low, high = schema.get("minimum"), schema.get("maximum")
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        if above is True or below is True:  # booleans, as in draft 4
            above, below = (low if above is True else None), (high if below is True else None)
        lows = [
            bound
            for bound in (low, None if above in (None, False) else above + step)
            if bound is not None
        ]
        highs = [
            bound
            for bound in (high, None if below in (None, False) else below - step)
            if bound is not None
        ]
        lower = max(lows) if lows else (min(highs) - _SPAN if highs else 0)
        return lower, min(highs) if highs else lower + _SPAN

    def _integer(self, schema: Mapping[str, Any], _: int) -> int:
        step = schema.get("multipleOf", 1)
        low, high = self._bounds(schema, 1)
        steps_min, steps_max = math.ceil(low / step), math.floor(high / step)
        return (
            int(self._rng.randint(steps_min, steps_max) * step)
            if steps_min <= steps_max
            else _nothing("a bound")
        )

    def _number(self, schema: Mapping[str, Any], depth: int) -> float:
        if "multipleOf" in schema:
            return self._integer(schema, depth)
        low, high = self._bounds(schema, 0)
        value = low + (high - low) * self._rng.random()
        return round(value, 2) if low <= round(value, 2) <= high else value


_COMBINING = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf")


def _merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema for both where that is simple; otherwise the second one's keyword wins."""
    both = {**first, **second}
    if "properties" in first and "properties" in second:
        names = {**first["properties"], **second["properties"]}
        shared = first["properties"].keys() & second["properties"].keys()
        both["properties"] = names | {
            name: {"allOf": [first["properties"][name], second["properties"][name]]}
            for name in shared
        }
    if "required" in first and "required" in second:
        both["required"] = [*first["required"], *second["required"]]
    for key, choose in (("minimum", max), ("minLength", max), ("minItems", max),
                        ("maximum", min), ("maxLength", min), ("maxItems", min)):  # fmt: skip
        if key in first and key in second:
            both[key] = choose(first[key], second[key])
    return both


def _nothing(why: str) -> Any:
    raise InvalidRequest(f"the simulated engine finds no value for {why}")
