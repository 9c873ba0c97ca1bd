"""Texts with places for fields: what is filled in, and what is refused at start or at a record."""

import datetime
import decimal
from typing import Any

import pytest

from schemas.errors import ConfigError, InvalidRequest
from streams.bridge.records.template import Template

ROW = {
    "name": "Ada",
    "city": {"zip": 123, "open": True},
    "lines": [{"sku": "x"}, {"sku": "y"}],
    "note": None,
    "at": datetime.date(2026, 1, 2),
    "price": decimal.Decimal("1.50"),
    "raw": b"\x00\xff",
    "odd": "{name}",
}


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("Hello", "Hello"),
        ("{name}!", "Ada!"),
        ("{city.zip}/{city.open}", "123/true"),
        ("{lines.1.sku} of {lines}", 'y of [{"sku": "x"}, {"sku": "y"}]'),
        ("{{name}} {name}}}", "{name} Ada}"),
        ("<{note?}{absent?}{city.absent?}{lines.9?}>", "<>"),
        ("{at} {price} {raw}", "2026-01-02 1.50 AP8="),
        ("{odd}", "{name}"),
    ],
)
def test_template_fills_fields(text: str, filled: str) -> None:
    assert Template(text).fill(ROW) == filled


@pytest.mark.parametrize("text", ["{name", "name}", "{}", "{a b}", "{a..b}", "{{{", "{a?b}", "{?}"])
def test_template_rejects_invalid_syntax_at_start(text: str) -> None:
    with pytest.raises(ConfigError, match="expected the name of a field in braces"):
        Template(text)


@pytest.mark.parametrize("path", ["absent", "note", "city.absent", "name.0", "lines.x", "lines.2"])
def test_template_error_names_missing_field(path: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"expected a field {path}, found none.*name, city"):
        Template("x {" + path + "}").fill(ROW)


@pytest.mark.parametrize("row", [{}, {"a": {}}])
def test_template_rejects_record_without_fields(row: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"expected a field b"):
        Template("{b}").fill(row)
