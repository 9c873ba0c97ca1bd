"""Defines one form for all traffic traces: arrival times, lengths, sessions and block ids.

It knows no file format (`formats.py` lists those), and no texts: a prompt is its length and, where
the trace has them, the ids of its blocks. Equal ids are equal prefixes.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from schemas.errors import ConfigError

BLOCK_TOKENS = 512  # where a format gives no block size; Mooncake's size


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """A condition for sending a request: another request's dispatch or completion."""

    request_id: str
    delay_ms: float = 0.0
    trigger: str = "completion"  # or dispatch
    relation: str = "sequence"  # or spawn, join, replay_barrier


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a trace. Requests with the same session are its turns, in order of time."""

    at_ms: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int] = ()
    request_id: str = ""
    session_id: str = ""
    after: Sequence[After] = ()
    model: str = ""
    priority: str = ""
    ttft_ms: float | None = None  # as measured where the trace was taken
    total_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of time."""

    format: str
    arrivals: Sequence[Arrival]
    block_tokens: int = BLOCK_TOKENS
    began_unix_ms: int = 0  # wall time of at_ms 0; 0: unknown
    left_out: Mapping[str, int] = field(default_factory=dict)  # other lines, by reason


class TraceBuilder:
    """Collects requests while a reader builds a trace."""

    def __init__(self, format_: str) -> None:
        self._format = format_
        self.arrivals: list[Arrival] = []
        self.left_out = Counter[str]()

    def build(self, *, block_tokens: int = BLOCK_TOKENS, began_unix_ms: int = 0) -> Trace:
        """Return the trace in order of time; lines of the same time keep their order."""
        return Trace(
            format=self._format,
            arrivals=sorted(self.arrivals, key=lambda arrival: arrival.at_ms),
            block_tokens=block_tokens,
            began_unix_ms=began_unix_ms,
            left_out=dict(self.left_out),
        )


class BlockIds:
    """Small ids for names of blocks; equal names get equal ids."""

    def __init__(self) -> None:
        self._ids: dict[object, int] = {}

    def of(self, names: Iterable[object]) -> tuple[int, ...]:
        """Return one id for each name."""
        return tuple(self._ids.setdefault(name, len(self._ids)) for name in names)


def blocks_of(tokens: int, block_tokens: int) -> int:
    """Return how many blocks a prompt has; the last one may be partly full."""
    return math.ceil(tokens / block_tokens)


def scale_trace(trace: Trace, scale: float) -> Trace:
    """Scale prompts, answers and blocks, so that equal prefixes stay equal."""
    block_tokens = max(1, round(trace.block_tokens * scale))
    ratio = block_tokens / trace.block_tokens
    arrivals = [
        replace(
            arrival,
            prompt_tokens=math.ceil(arrival.prompt_tokens * ratio),
            output_tokens=math.ceil(arrival.output_tokens * ratio),
        )
        for arrival in trace.arrivals
    ]
    return replace(trace, arrivals=arrivals, block_tokens=block_tokens)


def with_request_ids(trace: Trace) -> list[Arrival]:
    """Return the requests, each with an id."""
    return [
        arrival if arrival.request_id else replace(arrival, request_id=f"r{number}")
        for number, arrival in enumerate(trace.arrivals)
    ]


def with_delays(trace: Trace) -> list[tuple[Arrival, float | None]]:
    """Return requests with ids and delays after their session's last turn, or None without a delay.

    Raises ConfigError for other dependencies, which most formats cannot express.
    """
    turns: list[tuple[Arrival, float | None]] = []
    last: dict[str, str] = {}
    for arrival in with_request_ids(trace):
        before = last.get(arrival.session_id)
        for wait in arrival.after:
            if len(arrival.after) > 1 or wait.trigger != "completion" or wait.request_id != before:
                raise ConfigError(
                    f"{arrival.request_id}: expected a request that waits for the turn before it "
                    f"alone, found that it waits for the {wait.trigger} of {wait.request_id}; "
                    "this format cannot say that"
                )
        turns.append((arrival, arrival.after[0].delay_ms if arrival.after else None))
        if arrival.session_id:
            last[arrival.session_id] = arrival.request_id
    return turns


def reblock(trace: Trace, block_tokens: int) -> Trace:
    """Return the trace with larger blocks, each of several whole ones; shared prefixes stay shared.

    Raises ConfigError where `block_tokens` is no multiple of the trace's block size.
    """
    ratio = block_tokens // trace.block_tokens
    if ratio * trace.block_tokens != block_tokens and any(
        arrival.blocks for arrival in trace.arrivals
    ):
        raise ConfigError(
            f"expected blocks of which some make {block_tokens} tokens, found blocks of "
            f"{trace.block_tokens}; this format cannot say that"
        )
    ids = BlockIds()
    arrivals = [
        replace(arrival, blocks=_grouped(arrival.blocks, ratio, ids)) for arrival in trace.arrivals
    ]
    return replace(trace, arrivals=arrivals, block_tokens=block_tokens)


def _grouped(blocks: Sequence[int], ratio: int, ids: BlockIds) -> tuple[int, ...]:
    groups: tuple[int, ...] = ()
    for at in range(0, len(blocks), max(1, ratio)):
        groups += ids.of([(groups[-1:], tuple(blocks[at : at + ratio]))])
    return groups


def head(trace: Trace, requests: int) -> Trace:
    """Return the trace with its first requests only."""
    return replace(trace, arrivals=trace.arrivals[:requests])
