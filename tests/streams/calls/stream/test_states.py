"""The table of a stream's states: complete, and without dead ends."""

from pathlib import Path

from streams.calls.stream.states import (
    MEANING,
    TRANSITIONS,
    StreamEvent,
    StreamState,
    render_table,
)

OVER = {StreamState.ENDED, StreamState.BROKEN}


def test_every_state_has_meaning_and_is_reachable() -> None:
    assert set(MEANING) == set(StreamState)
    assert {event for _, event in TRANSITIONS} == set(StreamEvent)
    assert {StreamState.OPEN, *TRANSITIONS.values()} == set(StreamState)


def test_stream_that_is_over_changes_no_more() -> None:
    assert {state for state, _ in TRANSITIONS} == set(StreamState) - OVER


def test_higher_attempt_reopens_every_stream_that_is_not_over() -> None:
    for state in set(StreamState) - OVER:
        assert TRANSITIONS[state, StreamEvent.ATTEMPT] is StreamState.OPEN


def test_readme_shows_state_table() -> None:
    """Otherwise put what `render_table()` gives into the page."""
    page = Path(__file__).parents[4] / "streams/gateway/README.md"
    assert render_table() in page.read_text()
