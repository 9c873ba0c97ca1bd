"""JSON whose numbers keep their digits, from what producers write to what is made of it.

A parser makes a float of 0.12345678901234567890, and another number of 2**64. People join by such
numbers, so one that would not be written again as it came is kept as `Digits`.
"""

import base64
import json
import re
from dataclasses import dataclass
from typing import Any

import orjson

# Whatever may be another number, or be written otherwise, after it was a float; texts too.
_SUSPECT = re.compile(rb"[0-9.]{16}|[0-9][eE]|\.[0-9]*0(?![0-9])|0\.0000")
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1  # that JSON is written with here


@dataclass(frozen=True, slots=True)
class Digits:
    """A number as it was written."""

    text: str

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    @property
    def number(self) -> int | float:
        """The nearest one that there is."""
        return int(self.text) if self.text.lstrip("-").isdigit() else float(self.text)


def loads(text: bytes) -> Any:
    """A value; raises ValueError, also for numbers that no float can hold."""
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
    """A value as JSON, without spaces; what only Avro knows is text in it. Raises TypeError."""
    return orjson.dumps(value, default=_raw, option=orjson.OPT_PASSTHROUGH_DATACLASS).decode()


def _raw(value: Any) -> Any:
    return orjson.Fragment(value.text) if isinstance(value, Digits) else plain(value)


def json_text(value: Any) -> str:
    """A value as JSON, as people write it; what only Avro knows is text, and a text itself."""
    if not isinstance(value, dict | list | tuple | bool | int | float):
        return plain(value)
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain_but_digits)
    except _FoundDigits:
        return _encode_with_digits(value)


class _FoundDigits(Exception):
    """No encoder writes them; then it is done here, which is slow."""


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
    """What JSON has no kind for (dates, decimals, bytes), as text."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def nearest(value: Any) -> Any:
    """The same value with numbers where there are digits, for whoever counts with them."""
    if isinstance(value, dict):
        return {name: nearest(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [nearest(inner) for inner in value]
    return value.number if isinstance(value, Digits) else value
