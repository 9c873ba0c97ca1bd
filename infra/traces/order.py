"""Orders a trace's requests for sending: each after those that it waits for.

A request waits for those that the trace names, else for its session's previous turn, as in a
conversation. Of requests that may be sent, the one with the earlier time comes first.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from infra.traces.trace import After, Arrival, Trace, with_request_ids
from schemas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SendStep:
    """A request, and the positions in the order of the requests that it waits for."""

    arrival: Arrival
    at_ms: float  # no earlier than the requests that it waits for
    waits: tuple[tuple[int, After], ...]


def in_order(trace: Trace) -> list[SendStep]:
    """Return every request once; raises ConfigError for unknown or circular waits."""
    arrivals = with_request_ids(trace)
    waits = [
        _waits(arrival, before)
        for arrival, before in zip(arrivals, _previous_turns(arrivals), strict=True)
    ]
    numbers = {arrival.request_id: number for number, arrival in enumerate(arrivals)}
    followers: dict[int, list[int]] = {}
    for number, predecessors in enumerate(waits):
        for wait in predecessors:
            if wait.request_id not in numbers:
                raise ConfigError(
                    f"{arrivals[number].request_id}: waits for {wait.request_id}, which is no "
                    "request of the trace"
                )
            followers.setdefault(numbers[wait.request_id], []).append(number)
    return _sorted(arrivals, waits, numbers, followers)


def _previous_turns(arrivals: Sequence[Arrival]) -> list[str]:
    last: dict[str, str] = {}
    request_ids = []
    for arrival in arrivals:
        request_ids.append(last.get(arrival.session_id, ""))
        if arrival.session_id:
            last[arrival.session_id] = arrival.request_id
    return request_ids


def _waits(arrival: Arrival, before: str) -> tuple[After, ...]:
    return tuple(arrival.after) or ((After(request_id=before),) if before else ())


def _sorted(
    arrivals: Sequence[Arrival],
    waits: Sequence[tuple[After, ...]],
    numbers: dict[str, int],
    followers: dict[int, list[int]],
) -> list[SendStep]:
    at_ms = [arrival.at_ms for arrival in arrivals]
    open_waits = [len(predecessors) for predecessors in waits]
    ready = [(at_ms[n], n) for n in range(len(arrivals)) if not open_waits[n]]
    heapq.heapify(ready)
    places: dict[int, int] = {}
    steps: list[SendStep] = []
    while ready:
        at, number = heapq.heappop(ready)
        behind = tuple((places[numbers[wait.request_id]], wait) for wait in waits[number])
        places[number] = len(steps)
        steps.append(SendStep(arrivals[number], at, behind))
        for follower in followers.get(number, ()):
            at_ms[follower] = max(at_ms[follower], at)
            open_waits[follower] -= 1
            if not open_waits[follower]:
                heapq.heappush(ready, (at_ms[follower], follower))
    if len(steps) < len(arrivals):
        names = [arrival.request_id for n, arrival in enumerate(arrivals) if n not in places][:5]
        raise ConfigError(f"{', '.join(names)}: wait for each other in a circle")
    return steps
