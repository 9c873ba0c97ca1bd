"""The states of a stream: one table of states and transitions.

`Stream` steps through this table, and `streams/gateway/README.md` is rendered from it. An event
that the table does not have for a state changes nothing.
"""

from enum import StrEnum


class StreamState(StrEnum):
    """The states of a stream, from its request to its end."""

    OPEN = "open"
    VOID = "void"
    ENDING = "ending"
    ENDED = "ended"
    BROKEN = "broken"


class StreamEvent(StrEnum):
    """Events that change the state of a stream."""

    ATTEMPT = "a higher attempt begins"
    MARK = "its attempt is marked as void"
    ANSWER = "the void attempt's end arrives as a completed answer"
    END = "the end of its attempt arrives"
    WHOLE = "all rows before the end are here"
    DIFFERENCE = "an attempt repeats other tokens, and that is not tolerated"


MEANING = {
    StreamState.OPEN: "takes the rows of its attempt",
    StreamState.VOID: "withholds rows of the void attempt, until its end or a higher one arrives",
    StreamState.ENDING: "has its end, and waits for rows before it",
    StreamState.ENDED: "is over, and complete up to its end",
    StreamState.BROKEN: "takes nothing more; its call fails",
}

TRANSITIONS = {
    (StreamState.OPEN, StreamEvent.ATTEMPT): StreamState.OPEN,
    (StreamState.OPEN, StreamEvent.MARK): StreamState.VOID,
    (StreamState.OPEN, StreamEvent.END): StreamState.ENDING,
    (StreamState.OPEN, StreamEvent.DIFFERENCE): StreamState.BROKEN,
    (StreamState.VOID, StreamEvent.ATTEMPT): StreamState.OPEN,
    (StreamState.VOID, StreamEvent.MARK): StreamState.VOID,
    (StreamState.VOID, StreamEvent.ANSWER): StreamState.OPEN,
    (StreamState.VOID, StreamEvent.END): StreamState.ENDING,
    (StreamState.ENDING, StreamEvent.ATTEMPT): StreamState.OPEN,
    (StreamState.ENDING, StreamEvent.END): StreamState.ENDING,
    (StreamState.ENDING, StreamEvent.WHOLE): StreamState.ENDED,
    (StreamState.ENDING, StreamEvent.DIFFERENCE): StreamState.BROKEN,
}


def render_table() -> str:
    """Return the table as Markdown, for `streams/gateway/README.md`."""
    lines = ["| state | the stream | event | next state |", "| --- | --- | --- | --- |"]
    for state, meaning in MEANING.items():
        steps = [(event, to) for (at, event), to in TRANSITIONS.items() if at is state]
        for number, (event, to) in enumerate(steps):
            first = f"`{state}` | {meaning}" if not number else " | "
            lines.append(f"| {first} | {event} | `{to}` |")
        if not steps:
            lines.append(f"| `{state}` | {meaning} | | |")
    return "\n".join(lines)
