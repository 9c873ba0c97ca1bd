"""Which outcome of a request counts."""

from dataclasses import replace
from typing import Any

from schemas.rules.outcomes import counting_outcome, outcome_key
from tests.schemas.examples import example


def test_outcome_of_highest_attempt_counts_in_any_order() -> None:
    outcome: Any = example("trivium.Outcome")
    first, second = (replace(outcome, request_id="r", attempt=attempt) for attempt in (1, 2))
    assert counting_outcome([first, second]) == counting_outcome([second, first]) == second
    assert counting_outcome([]) is None
    assert [outcome_key(first), outcome_key(second)] == ["r.1", "r.2"]
