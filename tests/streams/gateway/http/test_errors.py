"""How values are shown in messages, and which of several faults is told."""

from typing import Any

import pytest
from pydantic import ValidationError

from streams.gateway.http.errors import from_validation, shorten
from streams.gateway.request.body import MESSAGES_MAX
from streams.gateway.request.responses_body import ResponsesBody


def test_what_was_found_is_shown_whatever_it_is() -> None:
    """Python writes no number of 4 301 digits, and raises instead."""
    for value in (10**4_301, -(10**9_000), [10**4_301], {"n": 10**5_000}):
        assert "a number of very many digits" in shorten(value)
    assert len(shorten("x" * 10_000)) < 100


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([{}] * (MESSAGES_MAX + 1), f"input: list should have at most {MESSAGES_MAX} items"),
        (["a"], "input.0: expected a valid dictionary"),
        (7, "input: expected a valid string, found 7"),
    ],
)
def test_a_fault_is_that_of_the_kind_which_the_field_has(value: Any, said: str) -> None:
    """Too many items were `expected a valid string`."""
    with pytest.raises(ValidationError) as caught:
        ResponsesBody.model_validate({"input": value})
    assert str(from_validation(caught.value)).startswith(said)
