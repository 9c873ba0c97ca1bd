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


def test_every_state_has_meaning_and_is_reachable() -> None:
    assert set(MEANING) == set(State)
    reached, waiting = set[State](), [State.RETRIEVING]
    while waiting:
        state = waiting.pop()
        reached.add(state)
        waiting += following(state) - reached
    assert reached == set(State)


@pytest.mark.parametrize("state", [state for state in State if STANDS_ON[state]])
def test_worker_loss_changes_state_of_request(state: State) -> None:
    for side in STANDS_ON[state]:
        to = TRANSITIONS[state, side, LOST]
        assert to is not state
        assert side not in STANDS_ON[to] or to is State.ENDED


@pytest.mark.parametrize("state", sorted(ON_WORKERS))
def test_refusal_or_failure_equals_worker_loss(state: State) -> None:
    """A hand-over is different: its prefill worker has done its part."""
    for side in STANDS_ON[state]:
        for word in GIVEN_UP:
            assert TRANSITIONS[state, side, word] is TRANSITIONS[state, side, LOST]


def test_transitions_come_only_from_sides_of_their_state() -> None:
    assert all(side in STANDS_ON[state] for state, side, _ in TRANSITIONS)
    assert not any(STANDS_ON[s] for s in (State.RETRIEVING, State.QUEUED, State.ENDED))
    assert {state for state, _, _ in TRANSITIONS} == {s for s in State if STANDS_ON[s]}


def test_decode_side_is_last_of_every_pair() -> None:
    """The last side ends the request, and only decode ends a pair."""
    pairs = [sides for sides in STANDS_ON.values() if len(sides) > 1]
    assert pairs and all(sides == (Side.PREFILL, Side.DECODE) for sides in pairs)


def test_readme_shows_state_tables() -> None:
    """Otherwise put what `render_tables()` gives into the page."""
    page = Path(__file__).parents[3] / "streams/core/README.md"
    assert render_tables() in page.read_text()
