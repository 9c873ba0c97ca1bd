"""How values are shown in messages, and which of several faults is told."""

from typing import Any

import pytest
from pydantic import ValidationError

from streams.calls.errors import from_validation, shorten
from streams.calls.request.body import MESSAGES_MAX
from streams.calls.request.responses_body import ResponsesBody


def test_shorten_shows_any_value() -> None:
    """Python refuses to print a number of 4 301 digits."""
    for value in (10**4_301, -(10**9_000), [10**4_301], {"n": 10**5_000}):
        assert "a number of very many digits" in shorten(value)
    assert len(shorten("x" * 10_000)) < 100


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{}] * (MESSAGES_MAX + 1), f"input: list should have at most {MESSAGES_MAX} items"),
        (["a"], "input.0: expected a valid dictionary"),
        (7, "input: expected a valid string, found 7"),
    ],
)
def test_validation_error_matches_variant_of_field(value: Any, message: str) -> None:
    """Too many items must not be reported as `expected a valid string`."""
    with pytest.raises(ValidationError) as caught:
        ResponsesBody.model_validate({"input": value})
    assert str(from_validation(caught.value)).startswith(message)
