"""What formats can say of requests that wait for others."""

import pytest

from infra.traces.trace import After, Arrival, Trace, with_delays
from schemas.errors import ConfigError

FIRST = Arrival(at_ms=0, prompt_tokens=1, output_tokens=1, request_id="a", session_id="s")
OTHER = Arrival(at_ms=0, prompt_tokens=1, output_tokens=1, request_id="x")


def delays(*after: After) -> list[float | None]:
    """Of two turns, the second with these dependencies, and of another request between them."""
    turn = Arrival(at_ms=9, prompt_tokens=1, output_tokens=1, session_id="s", after=after)
    trace = Trace(format="test", arrivals=[FIRST, OTHER, turn])
    return [delay_ms for _, delay_ms in with_delays(trace)]


def test_a_delay_is_behind_the_turn_before() -> None:
    assert delays() == [None, None, None]
    assert delays(After(request_id="a", delay_ms=5)) == [None, None, 5]


@pytest.mark.parametrize(
    "after",
    [
        (After(request_id="a", trigger="dispatch"),),
        (After(request_id="x"),),
        (After(request_id="a"), After(request_id="a")),
    ],
)
def test_anything_else_is_refused_and_not_lost(after: tuple[After, ...]) -> None:
    with pytest.raises(ConfigError, match="r2: expected a request that waits for the turn before"):
        delays(*after)
