"""What formats can say of requests that wait for others."""

import pytest

from infra.traces.trace import After, Arrival, Trace, with_delays
from schemas.errors import ConfigError

FIRST = Arrival(at_ms=0, prompt_tokens=1, output_tokens=1, request_id="a", session_id="s")
OTHER = Arrival(at_ms=0, prompt_tokens=1, output_tokens=1, request_id="x")


def delays(*after: After) -> list[float | None]:
    """Return the delays of two turns, the second with these dependencies."""
    turn = Arrival(at_ms=9, prompt_tokens=1, output_tokens=1, session_id="s", after=after)
    trace = Trace(format="test", arrivals=[FIRST, OTHER, turn])
    return [delay_ms for _, delay_ms in with_delays(trace)]


def test_delay_counts_from_previous_turn() -> None:
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
def test_delays_refuse_other_dependencies(after: tuple[After, ...]) -> None:
    with pytest.raises(ConfigError, match="r2: expected a request that waits for the turn before"):
        delays(*after)
