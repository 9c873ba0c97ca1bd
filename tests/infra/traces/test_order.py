"""In which order requests may be sent."""

import pytest

from infra.traces.order import in_order
from infra.traces.trace import After, Arrival, Trace
from schemas.errors import ConfigError


def arrival(name: str, at_ms: float, *after: str, session_id: str = "") -> Arrival:
    """Return a request that waits for these requests."""
    waits = [After(request_id=request_id) for request_id in after]
    return Arrival(
        at_ms=at_ms,
        prompt_tokens=1,
        output_tokens=1,
        request_id=name,
        session_id=session_id,
        after=waits,
    )


def order(*arrivals: Arrival) -> list[tuple[str, float, list[str]]]:
    """Return name, time and dependencies of each step."""
    steps = in_order(Trace(format="test", arrivals=arrivals))
    return [
        (s.arrival.request_id, s.at_ms, [steps[place].arrival.request_id for place, _ in s.waits])
        for s in steps
    ]


def test_order_makes_turn_wait_for_previous_turn() -> None:
    steps = order(
        arrival("a1", 0, session_id="a"),
        arrival("x", 5),
        arrival("a2", 9, session_id="a"),
    )
    assert steps == [("a1", 0, []), ("x", 5, []), ("a2", 9, ["a1"])]


def test_order_follows_dependencies_over_position() -> None:
    """A request comes after its dependencies, and no earlier in time."""
    steps = order(arrival("join", 0, "a", "b"), arrival("a", 3), arrival("b", 1), arrival("c", 2))
    assert steps == [("b", 1, []), ("c", 2, []), ("a", 3, []), ("join", 3, ["a", "b"])]


def test_order_refuses_unknown_requests_and_cycles() -> None:
    with pytest.raises(ConfigError, match="a: waits for z, which is no request of the trace"):
        order(arrival("a", 0, "z"))
    with pytest.raises(ConfigError, match="b, c: wait for each other in a circle"):
        order(arrival("a", 0), arrival("b", 1, "c"), arrival("c", 2, "b"))
