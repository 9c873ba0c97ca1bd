"""Real traffic as scripts: the Azure 2023 code trace and Mooncake's synthetic trace.

Both are open loop: requests come when they came. Text is not in the traces; tokens are made from
lengths and block ids. Azure's requests stand alone. Mooncake names blocks of 512 tokens, equal ids
being equal prefixes; a request that goes on where an earlier one's blocks end, but for its last
two, belongs to its session.
"""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from infra.simulator.script import Conversation, Tokens, Turn, conversation
from infra.simulator.workload import unlike_others

MOONCAKE_BLOCK = 512
_LAST_BLOCKS = 2  # of a prompt that the next turn may not repeat: they end within a block
_OWN_TOKENS = 1 << 29  # names of requests; block ids are below


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a trace."""

    at_ms: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int] = ()


def azure(path: Path) -> list[Arrival]:
    """Columns TIMESTAMP, ContextTokens, GeneratedTokens (Azure Public Dataset, CC-BY 4.0)."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return [
        Arrival(
            at_ms=(time - times[0]).total_seconds() * 1e3,
            prompt_tokens=int(row["ContextTokens"]),
            output_tokens=max(1, int(row["GeneratedTokens"])),
        )
        for time, row in zip(times, rows, strict=True)
    ]


def mooncake(path: Path) -> list[Arrival]:
    """Lines of timestamp, input_length, output_length, hash_ids (Mooncake, Apache-2.0)."""
    with path.open() as file:
        rows = [json.loads(line) for line in file]
    return [
        Arrival(
            at_ms=float(row["timestamp"]),
            prompt_tokens=row["input_length"],
            output_tokens=max(1, row["output_length"]),
            blocks=row["hash_ids"],
        )
        for row in rows
    ]


FILES: dict[str, tuple[str, Callable[[Path], list[Arrival]]]] = {
    "azure code": ("azure_llm_2023_code.csv", azure),
    "mooncake synthetic": ("mooncake_synthetic.jsonl", mooncake),
}


def window(arrivals: Sequence[Arrival], duration_ms: float, seed: int) -> list[Arrival]:
    """A stretch of a trace, somewhere; the times of its requests stay."""
    last_ms = arrivals[-1].at_ms
    begin_ms = float(np.random.default_rng(seed).uniform(0, max(0.0, last_ms - duration_ms)))
    return [a for a in arrivals if begin_ms <= a.at_ms < begin_ms + duration_ms]


def script(
    arrivals: Sequence[Arrival], *, begin_ms: float, faster: float, block_tokens: int
) -> list[Conversation]:
    """The stretch as conversations of one request each, `faster` times as dense as it was."""
    found: list[Conversation] = []
    sessions: dict[int, tuple[str, int]] = {}  # block id to session and how many turns it has had
    first_ms = arrivals[0].at_ms
    for number, arrival in enumerate(arrivals):
        session_id, before = _session(arrival, sessions, f"s{number}")
        for block in arrival.blocks[-1 - _LAST_BLOCKS :]:
            sessions[block] = session_id, before + 1
        turn = Turn(prompt_tokens=arrival.prompt_tokens, output_tokens=arrival.output_tokens)
        found.append(
            conversation(
                f"r{number}",
                begin_ms + (arrival.at_ms - first_ms) / faster,
                [turn],
                _tokens(arrival, number),
                block_tokens,
                session_id=session_id,
                turns_before=before,
            )
        )
    return found


def _session(
    arrival: Arrival, sessions: dict[int, tuple[str, int]], otherwise: str
) -> tuple[str, int]:
    """The session whose last prompt this one extends, and its turns so far."""
    for block in reversed(arrival.blocks):
        if block in sessions:
            return sessions[block]
    return otherwise, 0


def _tokens(arrival: Arrival, number: int) -> Tokens:
    """A prompt and its answer: each known block a run of its id, the rest unlike all others."""
    own = unlike_others(_OWN_TOKENS + number, arrival.prompt_tokens + arrival.output_tokens)
    named = np.repeat(np.asarray(arrival.blocks, np.int32), MOONCAKE_BLOCK)[: arrival.prompt_tokens]
    own[: len(named)] = named
    return own
