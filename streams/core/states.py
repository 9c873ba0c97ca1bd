"""The states of a request: one table of states and transitions.

Theory of operation. A placed request stands on one or two workers: on the side of prefill, of
decode, or of both. A worker's report (a `Phase`) and the loss of a worker are looked up in
`TRANSITIONS` under (state, side, word). A combination that is not there changes nothing: the report
is stale, or its worker is no longer one on which the request stands. `BEGINS` and `CANCELS` have
the transitions that the router makes without a report. A request with a retrieval begins as
`retrieving`, and is queued when its router reads the result of the search in the log, or that
there is none. A request that will be placed again is `continuing` before it is queued, if its
answer can be continued.

The live path (`handlers/attempts.py`) and the rebuild (`requests/recovery.py`) both step through
this table, and the tables of `streams/core/README.md` are rendered from it. Decides nothing else:
`handlers/` has what a step means for credits, records and other workers.
"""

from enum import StrEnum
from itertools import product
from typing import Final, Literal

from schemas.records import Orchestration, PhaseKind


class State(StrEnum):
    """The states of a request, from its arrival to its end."""

    RETRIEVING = "retrieving"
    QUEUED = "queued"
    CONTINUING = "continuing"
    PREFILLING = "prefilling"
    HANDING_OVER = "handing_over"
    ALLOCATING = "allocating"
    PAIRED = "paired"
    RECEIVED = "received"
    DECODING = "decoding"
    CANCELLING = "cancelling"
    ENDED = "ended"


class Side(StrEnum):
    """The phase that a worker runs for a request; a replica worker counts as decode."""

    PREFILL = "prefill"
    DECODE = "decode"


Word = PhaseKind | Literal["lost"]
LOST: Final = "lost"  # no report: the router found that the worker is lost

MEANING = {
    State.RETRIEVING: "waits for the result of its search, or for the notice that there is none",
    State.QUEUED: "waits in the router's queue, for the first time or again",
    State.CONTINUING: "waits for its readers to report how much of its answer they have",
    State.PREFILLING: "runs on a prefill worker, which computes the prompt",
    State.HANDING_OVER: "has its KV on the prefill worker; no decode worker has room yet",
    State.ALLOCATING: "runs as a pair: the decode worker allocates blocks for the KV",
    State.PAIRED: "runs on a prefill and a decode worker together",
    State.RECEIVED: "runs as a pair: decode has the KV, prefill has not reported its end",
    State.DECODING: "runs on a decode or replica worker, which generates the answer",
    State.CANCELLING: "was given up; the router told the worker that will end it to stop",
    State.ENDED: "has its outcome",
}

BEGINS = {
    Orchestration.PREFILL_FIRST: State.PREFILLING,
    Orchestration.DECODE_FIRST: State.ALLOCATING,
    Orchestration.CONCURRENT: State.PAIRED,
    Orchestration.NONE: State.DECODING,
}
"""A placement takes a queued request to the state of its orchestration."""

CANCELS = {
    State.RETRIEVING: State.ENDED,
    State.QUEUED: State.ENDED,
    State.CONTINUING: State.ENDED,
    State.PREFILLING: State.CANCELLING,
    State.HANDING_OVER: State.ENDED,
    State.ALLOCATING: State.CANCELLING,
    State.PAIRED: State.CANCELLING,
    State.RECEIVED: State.CANCELLING,
    State.DECODING: State.CANCELLING,
}
"""A cancellation takes a request to this state: a worker that has the request ends it, otherwise
the router does."""


_PREFILL, _DECODE, _BOTH = (Side.PREFILL,), (Side.DECODE,), (Side.PREFILL, Side.DECODE)
_DONE: tuple[Word, ...] = (PhaseKind.PREFILL_DONE,)
_GIVEN_UP: tuple[Word, ...] = (PhaseKind.REFUSED, PhaseKind.FAILED, LOST)
_ROWS: tuple[tuple[State, tuple[Side, ...], tuple[Word, ...], State], ...] = (
    (State.PREFILLING, _PREFILL, _DONE, State.HANDING_OVER),
    (State.PREFILLING, _PREFILL, _GIVEN_UP, State.QUEUED),
    (State.HANDING_OVER, _PREFILL, (LOST,), State.QUEUED),
    (State.ALLOCATING, _DECODE, (PhaseKind.KV_ALLOCATED,), State.PAIRED),
    (State.ALLOCATING, _BOTH, _GIVEN_UP, State.QUEUED),
    (State.PAIRED, _PREFILL, _DONE, State.DECODING),
    (State.PAIRED, _DECODE, (PhaseKind.KV_RECEIVED, PhaseKind.KV_MISSED), State.RECEIVED),
    (State.PAIRED, _BOTH, _GIVEN_UP, State.QUEUED),
    (State.RECEIVED, _PREFILL, (*_DONE, *_GIVEN_UP), State.DECODING),
    (State.RECEIVED, _DECODE, _GIVEN_UP, State.QUEUED),
    (State.DECODING, _DECODE, _GIVEN_UP, State.QUEUED),
    (State.CANCELLING, _PREFILL, (*_DONE, *_GIVEN_UP), State.ENDED),
    (State.CANCELLING, _DECODE, _GIVEN_UP, State.ENDED),
)
TRANSITIONS: dict[tuple[State, Side, Word], State] = {
    (state, side, word): following
    for state, sides, words, following in _ROWS
    for side, word in product(sides, words)
}
"""A worker's report or loss takes a request to the next state. `queued` means to place it again:
the request ends instead if that is useless, or if it was cancelled in the meantime."""

STANDS_ON: dict[State, tuple[Side, ...]] = {
    state: tuple(side for side in Side if (state, side, LOST) in TRANSITIONS) for state in State
}
"""The sides on which a request stands, by state; the side that will end it is last. While it is
being cancelled, it stands on that side only."""

ON_WORKERS = frozenset(
    state for state, following in CANCELS.items() if following is State.CANCELLING
)
"""States in which workers have the request, so that one of them ends it."""


def render_tables() -> str:
    """Return the tables as Markdown, for `streams/core/README.md`."""
    lines = ["| state | the request | runs on |", "| --- | --- | --- |"]
    for state, meaning in MEANING.items():
        between = " or " if state is State.CANCELLING else " and "
        lines.append(f"| `{state}` | {meaning} | {between.join(STANDS_ON[state])} |")
    lines += ["", "| in state | side | reports | next state |", "| --- | --- | --- | --- |"]
    for state, sides, words, following in _ROWS:
        word_text = ", ".join("*lost*" if word == LOST else f"`{word}`" for word in words)
        lines.append(f"| `{state}` | {' or '.join(sides)} | {word_text} | `{following}` |")
    lines += ["", "| the router | in state | next state |", "| --- | --- | --- |"]
    lines.append(f"| reads the result of its search | `{State.RETRIEVING}` | `{State.QUEUED}` |")
    lines.append(f"| gives up an attempt that can be continued | any | `{State.CONTINUING}` |")
    lines.append(f"| reads how much its readers have | `{State.CONTINUING}` | `{State.QUEUED}` |")
    for orchestration, state in BEGINS.items():
        name = "in place" if orchestration is Orchestration.NONE else f"`{orchestration}`"
        lines.append(f"| places it, {name} | `{State.QUEUED}` | `{state}` |")
    lines.append(f"| hands it over | `{State.HANDING_OVER}` | `{State.DECODING}` |")
    for state, following in CANCELS.items():
        lines.append(f"| cancels it | `{state}` | `{following}` |")
    return "\n".join(lines)
