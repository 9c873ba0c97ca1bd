"""Converts the form of an answer to vLLM's parameters and back; imports no vLLM.

vLLM's `StructuredOutputsParams` has a field for each kind of form. The engine sets it, and parsers
read and set it.
"""

import json
from typing import Any

from schemas.records import Structured, StructuredKind

_TEXT_FIELDS = {
    StructuredKind.JSON_SCHEMA: "json",
    StructuredKind.REGEX: "regex",
    StructuredKind.GRAMMAR: "grammar",
    StructuredKind.STRUCTURAL_TAG: "structural_tag",
}


def params_fields(structured: Structured) -> dict[str, Any]:
    """Return the arguments of `StructuredOutputsParams`; raises ValueError for bad choices."""
    value = structured.value
    if structured.kind is StructuredKind.JSON_OBJECT:
        return {"json_object": True}
    if structured.kind is StructuredKind.CHOICE:
        choices = json.loads(value)
        if not isinstance(choices, list) or not all(isinstance(c, str) for c in choices):
            raise ValueError(f"expected a JSON list of strings as choices, found {value!r}")
        return {"choice": choices}
    return {_TEXT_FIELDS[structured.kind]: value}


def structured_of(params: Any) -> Structured | None:
    """Return the form in `StructuredOutputsParams`, or None."""
    if params is None:
        return None
    if params.json_object:
        return Structured(kind=StructuredKind.JSON_OBJECT, value="")
    if params.choice is not None:
        return Structured(kind=StructuredKind.CHOICE, value=json.dumps(params.choice))
    for kind, field in _TEXT_FIELDS.items():
        if (value := getattr(params, field)) is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            return Structured(kind=kind, value=text)
    return None
