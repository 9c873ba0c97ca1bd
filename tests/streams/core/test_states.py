"""The table of states: complete, and without dead ends."""

from pathlib import Path

import pytest

from schemas.records import PhaseKind
from streams.core.states import (
    BEGINS,
    CANCELS,
    LOST,
    MEANING,
    ON_WORKERS,
    STANDS_ON,
    TRANSITIONS,
    Side,
    State,
    render_tables,
)

GIVEN_UP = (PhaseKind.REFUSED, PhaseKind.FAILED)


def following(state: State) -> set[State]:
    """Where a request may go from there, but for its outcome."""
    steps = {to for (at, _, _), to in TRANSITIONS.items() if at is state}
    steps |= {CANCELS[state]} if state in CANCELS else set()
    steps |= set(BEGINS.values()) if state is State.QUEUED else set()
    steps |= {State.QUEUED} if state in (State.RETRIEVING, State.CONTINUING) else set()
    steps |= {State.CONTINUING} if State.QUEUED in steps and state in ON_WORKERS else set()
    return steps | ({State.DECODING} if state is State.HANDING_OVER else set())


def test_each_state_has_its_meaning_and_can_be_reached() -> None:
    assert set(MEANING) == set(State)
    reached, waiting = set[State](), [State.RETRIEVING]
    while waiting:
        state = waiting.pop()
        reached.add(state)
        waiting += following(state) - reached
    assert reached == set(State)


@pytest.mark.parametrize("state", [state for state in State if STANDS_ON[state]])
def test_no_worker_is_lost_without_a_consequence(state: State) -> None:
    for side in STANDS_ON[state]:
        to = TRANSITIONS[state, side, LOST]
        assert to is not state
        assert side not in STANDS_ON[to] or to is State.ENDED


@pytest.mark.parametrize("state", sorted(ON_WORKERS))
def test_what_refuses_or_fails_is_as_good_as_lost(state: State) -> None:
    """Not while it is handed over: then the prefill worker has done its part."""
    for side in STANDS_ON[state]:
        for word in GIVEN_UP:
            assert TRANSITIONS[state, side, word] is TRANSITIONS[state, side, LOST]


def test_only_those_on_whom_a_request_stands_have_a_say() -> None:
    assert all(side in STANDS_ON[state] for state, side, _ in TRANSITIONS)
    assert not any(STANDS_ON[s] for s in (State.RETRIEVING, State.QUEUED, State.ENDED))
    assert {state for state, _, _ in TRANSITIONS} == {s for s in State if STANDS_ON[s]}


def test_whoever_decodes_is_told_last() -> None:
    """The last side ends the request, and only decode ends a pair."""
    pairs = [sides for sides in STANDS_ON.values() if len(sides) > 1]
    assert pairs and all(sides == (Side.PREFILL, Side.DECODE) for sides in pairs)


def test_the_page_shows_the_tables() -> None:
    """Otherwise put what `rendered()` gives into the page."""
    page = Path(__file__).parents[3] / "streams/core/README.md"
    assert render_tables() in page.read_text()
