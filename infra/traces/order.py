"""In which order a trace's requests may be sent: each behind those that it waits for.

A request waits for what the trace names, else for its session's turn before, as a conversation
does. Where two may be sent, the one with the earlier time comes first.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from infra.traces.trace import After, Arrival, Trace, named
from schemas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Step:
    """A request, and what it waits for, by position in the order."""

    arrival: Arrival
    at_ms: float  # no earlier than those that it waits for
    waits: tuple[tuple[int, After], ...]


def in_order(trace: Trace) -> list[Step]:
    """Every request once; raises ConfigError where one waits for none of the trace, or in a
    circle.
    """
    arrivals = named(trace)
    waits = [_waits(each, before) for each, before in zip(arrivals, _before(arrivals), strict=True)]
    numbers = {each.request_id: number for number, each in enumerate(arrivals)}
    followers: dict[int, list[int]] = {}
    for number, found in enumerate(waits):
        for wait in found:
            if wait.request_id not in numbers:
                raise ConfigError(
                    f"{arrivals[number].request_id}: waits for {wait.request_id}, which is no "
                    "request of the trace"
                )
            followers.setdefault(numbers[wait.request_id], []).append(number)
    return _sorted(arrivals, waits, numbers, followers)


def _before(arrivals: Sequence[Arrival]) -> list[str]:
    last: dict[str, str] = {}
    found = []
    for each in arrivals:
        found.append(last.get(each.session_id, ""))
        if each.session_id:
            last[each.session_id] = each.request_id
    return found


def _waits(arrival: Arrival, before: str) -> tuple[After, ...]:
    return tuple(arrival.after) or ((After(request_id=before),) if before else ())


def _sorted(
    arrivals: Sequence[Arrival],
    waits: Sequence[tuple[After, ...]],
    numbers: dict[str, int],
    followers: dict[int, list[int]],
) -> list[Step]:
    at_ms = [each.at_ms for each in arrivals]
    open_waits = [len(found) for found in waits]
    ready = [(at_ms[n], n) for n in range(len(arrivals)) if not open_waits[n]]
    heapq.heapify(ready)
    places: dict[int, int] = {}
    steps: list[Step] = []
    while ready:
        at, number = heapq.heappop(ready)
        behind = tuple((places[numbers[wait.request_id]], wait) for wait in waits[number])
        places[number] = len(steps)
        steps.append(Step(arrivals[number], at, behind))
        for follower in followers.get(number, ()):
            at_ms[follower] = max(at_ms[follower], at)
            open_waits[follower] -= 1
            if not open_waits[follower]:
                heapq.heappush(ready, (at_ms[follower], follower))
    if len(steps) < len(arrivals):
        names = [each.request_id for n, each in enumerate(arrivals) if n not in places][:5]
        raise ConfigError(f"{', '.join(names)}: wait for each other in a circle")
    return steps
