"""Numbers keep their digits from JSON to JSON and to texts, or are refused."""

import json
from contextlib import suppress
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.bridge.records.exact_json import dumps, json_text, loads, nearest

NUMBERS = [
    "12345678901234567890123", "18446744073709551616", "18446744073709551615",
    "-9223372036854775808", "-9223372036854775809", "0.1234567890123456789",
    "1234567890.12345678901", "12.50", "0.70", "1e5", "1E-7", "0.00001", "-0.10", "7", "-1.5", "0",
    "1234567890123456.7", "9007199254740993", "5e-324", "1.0", "100.0", "1.7976931348623157e308",
    "-0.0", "10000000000000000.0",
]  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS)
def test_exact_json_writes_number_as_read(number: str) -> None:
    text = f'{{"id":{number},"in":[{{"deep":{number}}}],"text":"{number}"}}'
    record = loads(text.encode())
    assert dumps(record) == text
    spaced = json_text(record)
    assert spaced.replace(" ", "") == text
    assert json.loads(spaced) == json.loads(text)
    assert json_text(record["id"]) == number
    assert nearest(record) == json.loads(text)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=12) | st.integers())
def test_exact_json_preserves_any_number(number: Decimal | int) -> None:
    text = f"[{number}]".lower()
    if abs(float(number)) < 1e300:
        assert dumps(loads(text.encode())) == text


@pytest.mark.parametrize(
    "text", [b"1e999", b"-1e999", b"NaN", b"[Infinity]", b'"\\ud800"', b"01", b"1."]
)
def test_exact_json_rejects_overflow_and_invalid_syntax(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"line 1|number"):
        loads(text)


def test_exact_json_limits_nesting() -> None:
    with pytest.raises(ValueError, match="nested|recursion|depth"):
        loads(b"[" * 1_100 + b"1.10" + b"]" * 1_100)
    with suppress(ValueError):  # Python's own parser may take less, as the interpreter is set
        loads(b"[" * 1_020 + b"1.10" + b"]" * 1_020)
