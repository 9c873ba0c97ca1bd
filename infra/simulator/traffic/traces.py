"""Real traffic as scripts: the Azure 2023 code trace and Mooncake's synthetic trace.

`infra/traces` reads the files. Both are open loop: requests are sent at their recorded times. The
traces have no text; tokens are made from lengths and block ids. Azure's requests are independent.
Mooncake names blocks of 512 tokens, where equal ids mean equal prefixes, and has no sessions; they
are inferred. A turn continues the last prompt whose own blocks it extends as a whole, if it also
has room for that prompt's answer. If prompts of the window diverge, the blocks before that are a
shared opening (a system prompt, or a document that many ask about) and belong to no session. A
prompt without further blocks begins no session.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from infra.simulator.traffic.poisson import unique_tokens
from infra.simulator.traffic.script import SimConversation, SimTurn, Tokens, conversation
from infra.traces.trace import BLOCK_TOKENS, Arrival

_OWN_TOKENS = 1 << 29  # first token id of requests, above all block ids
FILES = {
    "azure code": "azure_llm_2023_code.csv",
    "mooncake synthetic": "mooncake_synthetic.jsonl",
}


def window(arrivals: Sequence[Arrival], duration_ms: float, seed: int) -> list[Arrival]:
    """Return a random window of a trace; the requests keep their times."""
    last_ms = arrivals[-1].at_ms
    begin_ms = float(np.random.default_rng(seed).uniform(0, max(0.0, last_ms - duration_ms)))
    return [a for a in arrivals if begin_ms <= a.at_ms < begin_ms + duration_ms]


def script(
    arrivals: Sequence[Arrival],
    *,
    begin_ms: float,
    faster: float,
    block_tokens: int,
    named_tokens: int = BLOCK_TOKENS,
) -> list[SimConversation]:
    """Return the window as conversations of one request each, `faster` times as dense as recorded.

    `named_tokens` is the number of tokens of a block id of the trace.
    """
    conversations: list[SimConversation] = []
    first_ms = arrivals[0].at_ms
    for number, (arrival, (first, before)) in enumerate(
        zip(arrivals, sessions(arrivals), strict=True)
    ):
        turn = SimTurn(prompt_tokens=arrival.prompt_tokens, output_tokens=_answer_tokens(arrival))
        conversations.append(
            conversation(
                f"r{number}",
                begin_ms + (arrival.at_ms - first_ms) / faster,
                [turn],
                _tokens(arrival, number, named_tokens),
                block_tokens,
                session_id=f"s{first}",
                turns_before=before,
            )
        )
    return conversations


def sessions(arrivals: Sequence[Arrival]) -> list[tuple[int, int]]:
    """Return, for each request, the number of its session's first request and of earlier turns."""
    if any(arrival.session_id for arrival in arrivals):
        return _named_sessions(arrivals)
    shared = _shared_openings(arrivals)
    session_turns: list[tuple[int, int]] = []
    last: dict[int, int] = {}  # last request of a session, by its last whole block
    for number, arrival in enumerate(arrivals):
        blocks = _whole_blocks(arrival)
        at = next((block for block in reversed(blocks) if block in last), None)
        if at is not None and _has_room(arrival, arrivals[last[at]]):
            first, before = session_turns[last.pop(at)]
            session_turns.append((first, before + 1))
        else:
            session_turns.append((number, 0))
        if blocks and blocks[-1] not in shared:
            last[blocks[-1]] = number
    return session_turns


def _named_sessions(arrivals: Sequence[Arrival]) -> list[tuple[int, int]]:
    turns: defaultdict[str, list[int]] = defaultdict(list)
    session_turns = []
    for number, arrival in enumerate(arrivals):
        before = turns[arrival.session_id] if arrival.session_id else []
        session_turns.append((before[0] if before else number, len(before)))
        before.append(number)
    return session_turns


def _whole_blocks(arrival: Arrival) -> Sequence[int]:
    """Return the blocks without a partial last one, whose id changes once the prompt grows."""
    return arrival.blocks[: arrival.prompt_tokens // BLOCK_TOKENS]


def _has_room(arrival: Arrival, earlier: Arrival) -> bool:
    return arrival.prompt_tokens >= earlier.prompt_tokens + _answer_tokens(earlier)


def _shared_openings(arrivals: Sequence[Arrival]) -> set[int]:
    """Return the blocks after which, or after a later block, prompts diverge."""
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


def _tokens(arrival: Arrival, number: int, named_tokens: int) -> Tokens:
    """Return a prompt and its answer: each known block repeats its id, the rest is unique."""
    length = arrival.prompt_tokens + _answer_tokens(arrival)
    tokens = unique_tokens(_OWN_TOKENS + number, length)
    block_tokens = np.repeat(np.asarray(arrival.blocks, np.int32), named_tokens)[
        : arrival.prompt_tokens
    ]
    tokens[: len(block_tokens)] = block_tokens
    return tokens


def _answer_tokens(arrival: Arrival) -> int:
    """Return the tokens of the answer, at least one as engines do."""
    return max(1, arrival.output_tokens)
