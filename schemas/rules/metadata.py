"""The rules for a document's metadata: which fields and values are allowed.

Writers of documents refuse metadata that an index could not store, while file and line are known;
embedding workers check the documents of other writers, and the index checks the kinds of its
columns: a field has numbers, or texts and booleans. Pure.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.errors import InvalidRequest
from schemas.rules.filters import LIST_MAX, Value
from schemas.rules.numbers import float_of

METADATA_CHARS_MAX = 65_536
FIELDS_MAX = 64  # of a collection
TENANT = "$tenant"  # an internal field; no filter expression can name it
EXACT_MAX = 2**53
Metadata = Mapping[str, Value | list[Value]]  # by field
_HALF = re.compile("[\ud800-\udfff]")
Kinds = dict[str, bool]  # by field, whether it has numbers


def metadata_of(text: str) -> dict[str, Any]:
    """Return the fields with a value, unchecked. Raise InvalidRequest unless JSON of an object."""
    if len(text) > METADATA_CHARS_MAX:
        raise _wrong(f"at most {METADATA_CHARS_MAX} characters, found {len(text)}")
    try:
        fields: Any = json.loads(text or "{}", parse_float=float_of)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"a JSON object: {error}") from error
    if not isinstance(fields, dict):
        raise _wrong(f"a JSON object, found {fields!r:.80}")
    if TENANT in fields:
        raise InvalidRequest(
            f"metadata: {TENANT} is no name for a field; a document's tenant is a field of its own",
            "metadata",
        )
    return {name: value for name, value in fields.items() if value is not None}


def check_metadata(row: Mapping[str, Any], kinds: Kinds) -> None:
    """Raise InvalidRequest for fields that do not fit; add new fields to the kinds."""
    for field, field_value in row.items():
        values = values_of(field_value)
        if len(values) > LIST_MAX:
            raise _wrong(f"at most {LIST_MAX} values in field {field!r:.200}, found {len(values)}")
        for value in values:
            _check(field, value, kinds)
    if len(kinds) > FIELDS_MAX:
        raise _wrong(f"at most {FIELDS_MAX} fields, found {len(kinds)}")


def _check(field: str, value: Any, kinds: Kinds) -> None:
    if not isinstance(value, str | bool | int | float):
        name = {type(None): "null", dict: "an object", list: "a list"}.get(type(value), type(value))
        raise _wrong(
            "a text, a number, a truth value or a list of these in field "
            f"{field!r:.200}, found {name}"
        )
    numeric = is_number(value)
    if kinds.setdefault(field, numeric) != numeric:
        expected = "a number" if kinds[field] else "a text or truth value"
        raise _wrong(f"{expected} in field {field!r:.200}, as others have it, found {value!r:.80}")
    if numeric and not abs(value) <= EXACT_MAX:  # type: ignore[arg-type]  # a number
        raise _wrong(
            f"numbers within +-2**53 in field {field!r:.200}, found {value!r}; store it as text"
        )
    for text in (field, value):
        if isinstance(text, str) and not text.isascii() and _HALF.search(text):
            raise _wrong(f"characters in field {field!r:.200}, found half of a pair")


def is_number(value: Value) -> bool:
    """Return whether a value belongs into a column of numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def values_of(value: Value | list[Value]) -> Sequence[Value]:
    """Return the values of a row's field: a list has several or none."""
    return value if isinstance(value, list) else (value,)


def _wrong(expected: str) -> InvalidRequest:
    return InvalidRequest(f"metadata: expected {expected}", "metadata")
