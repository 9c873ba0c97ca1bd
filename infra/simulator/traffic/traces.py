"""Real traffic as scripts: the Azure 2023 code trace and Mooncake's synthetic trace.

Both are open loop: requests come when they came. Text is not in the traces; tokens are made from
lengths and block ids. Azure's requests stand alone. Mooncake names blocks of 512 tokens, equal ids
being equal prefixes, and no sessions. They are told by this: a turn goes on with the last prompt
that it extends as a whole, in all of that prompt's own blocks, and has room for its answer. Where
prompts of the stretch part, what lies before is a shared opening (a system prompt, a document
that many ask about) and belongs to nobody; a prompt that is no more than that begins no session.
"""

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from infra.simulator.traffic.poisson import unlike_others
from infra.simulator.traffic.script import Conversation, Tokens, Turn, conversation

MOONCAKE_BLOCK = 512
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
    first_ms = arrivals[0].at_ms
    for number, (arrival, (first, before)) in enumerate(
        zip(arrivals, sessions(arrivals), strict=True)
    ):
        turn = Turn(prompt_tokens=arrival.prompt_tokens, output_tokens=arrival.output_tokens)
        found.append(
            conversation(
                f"r{number}",
                begin_ms + (arrival.at_ms - first_ms) / faster,
                [turn],
                _tokens(arrival, number),
                block_tokens,
                session_id=f"s{first}",
                turns_before=before,
            )
        )
    return found


def sessions(arrivals: Sequence[Arrival]) -> list[tuple[int, int]]:
    """Of each request: the number of its session's first one, and how many turns came before."""
    shared = _shared_openings(arrivals)
    found: list[tuple[int, int]] = []
    last: dict[int, int] = {}  # by the last block of a session's last prompt: its number
    for number, arrival in enumerate(arrivals):
        blocks = _whole_blocks(arrival)
        at = next((block for block in reversed(blocks) if block in last), None)
        if at is not None and _has_room(arrival, arrivals[last[at]]):
            first, before = found[last.pop(at)]
            found.append((first, before + 1))
        else:
            found.append((number, 0))
        if blocks and blocks[-1] not in shared:
            last[blocks[-1]] = number
    return found


def _whole_blocks(arrival: Arrival) -> Sequence[int]:
    """Without the block that the prompt's end cuts: it has another name once there is more."""
    return arrival.blocks[: arrival.prompt_tokens // MOONCAKE_BLOCK]


def _has_room(arrival: Arrival, earlier: Arrival) -> bool:
    return arrival.prompt_tokens >= earlier.prompt_tokens + earlier.output_tokens


def _shared_openings(arrivals: Sequence[Arrival]) -> set[int]:
    """Blocks behind which, or behind a later one, prompts go on in more than one way."""
    followers: defaultdict[int, set[int]] = defaultdict(set)
    for arrival in arrivals:
        blocks = _whole_blocks(arrival)
        for block, following in zip(blocks, blocks[1:], strict=False):
            followers[block].add(following)
    parting = {block for block, following in followers.items() if len(following) > 1}
    shared: set[int] = set()
    for arrival in arrivals:
        blocks = _whole_blocks(arrival)
        ends = [at for at, block in enumerate(blocks) if block in parting]
        shared.update(blocks[: ends[-1] + 1] if ends else ())
    return shared


def _tokens(arrival: Arrival, number: int) -> Tokens:
    """A prompt and its answer: each known block a run of its id, the rest unlike all others."""
    own = unlike_others(_OWN_TOKENS + number, arrival.prompt_tokens + arrival.output_tokens)
    named = np.repeat(np.asarray(arrival.blocks, np.int32), MOONCAKE_BLOCK)[: arrival.prompt_tokens]
    own[: len(named)] = named
    return own
