"""Reads and writes JSON whose numbers keep their digits.

A parser turns 0.12345678901234567890 into a float, and 2**64 into another number. Users join tables
by such numbers, so a number that would be written differently is kept as `Digits`.
"""

import base64
import json
import re
from dataclasses import dataclass
from typing import Any

import orjson

# Matches numbers that a float may change, or write differently; strings may match too.
_SUSPECT = re.compile(rb"[0-9.]{16}|[0-9][eE]|\.[0-9]*0(?![0-9])|0\.0000")
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1  # integers that orjson writes


@dataclass(frozen=True, slots=True)
class Digits:
    """A number as it was written."""

    text: str

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    @property
    def number(self) -> int | float:
        """Return the nearest int or float."""
        return int(self.text) if self.text.lstrip("-").isdigit() else float(self.text)


def loads(text: bytes) -> Any:
    """Read a JSON value; raises ValueError, also for numbers that no float can represent."""
    value = orjson.loads(text)
    if not _SUSPECT.search(text):
        return value
    try:
        return json.loads(text, parse_int=_int, parse_float=_float)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _int(text: str) -> int | Digits:
    number = int(text)
    return number if _INT_MIN <= number <= _INT_MAX else Digits(text)


def _float(text: str) -> float | Digits:
    number = float(text)
    return number if repr(number) == text else Digits(text)


def dumps(value: Any) -> str:
    """Return a value as JSON without spaces; Avro's further types become text. Raises TypeError."""
    return orjson.dumps(value, default=_raw, option=orjson.OPT_PASSTHROUGH_DATACLASS).decode()


def _raw(value: Any) -> Any:
    return orjson.Fragment(value.text) if isinstance(value, Digits) else plain(value)


def json_text(value: Any) -> str:
    """Return a value as JSON with spaces; text stays itself, Avro's further types become text."""
    if not isinstance(value, dict | list | tuple | bool | int | float):
        return plain(value)
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain_but_digits)
    except _FoundDigits:
        return _encode_with_digits(value)


class _FoundDigits(Exception):
    """Raised at `Digits`, which `json` cannot write; a slow encoder here then does."""


def _plain_but_digits(value: Any) -> str:
    if isinstance(value, Digits):
        raise _FoundDigits
    return plain(value)


def _encode_with_digits(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (
            f"{json.dumps(name, ensure_ascii=False)}: {_encode_with_digits(value[name])}"
            for name in value
        )
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_encode_with_digits, value)) + "]"
    if isinstance(value, Digits):
        return value.text
    return json.dumps(value, ensure_ascii=False, default=plain)


def plain(value: Any) -> str:
    """Return a value without a JSON type (dates, decimals, bytes) as text."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def nearest(value: Any) -> Any:
    """Return the value with `Digits` replaced by the nearest numbers."""
    if isinstance(value, dict):
        return {name: nearest(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [nearest(inner) for inner in value]
    return value.number if isinstance(value, Digits) else value
