"""Scripts of conversations that arrive as a Poisson process, drawn from a seed.

Conversations have two or many turns. Scripts of real traffic come from
`infra/simulator/traffic/traces.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infra.simulator.traffic.script import SimConversation, SimTurn, Tokens, conversation

_VOCABULARY = 1 << 30  # a random token id names a conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnShape:
    """One kind of turn: the new tokens of its prompt, and the tokens of its answer."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One kind of conversation: its `first` turn, then `later` turns."""

    first: TurnShape
    later: TurnShape
    turns: int = 2
    think_ms: float = 1_000.0  # mean of an exponential distribution


def poisson(
    profile: Profile,
    *,
    per_s: float,
    duration_ms: float,
    begin_ms: float,
    block_tokens: int,
    seed: Sequence[int],
    name: str,
) -> list[SimConversation]:
    """Return conversations that begin within `duration_ms`; at least one.

    The same seed gives the same arrivals for every profile, and other arrivals at another load.
    """
    draw = np.random.default_rng([*seed, int(per_s * 1000)])
    conversations: list[SimConversation] = []
    at_ms = draw.exponential(1000.0 / per_s)
    while at_ms < duration_ms or not conversations:
        at_ms = min(at_ms, duration_ms)
        thinks = draw.exponential(profile.think_ms, profile.turns)
        turns = _turns(profile, thinks.tolist())
        length = turns[-1].prompt_tokens + turns[-1].output_tokens
        tokens = unique_tokens(int(draw.integers(_VOCABULARY)), length)
        session_id = f"{name}-{len(conversations)}"
        conversations.append(
            conversation(session_id, begin_ms + at_ms, turns, tokens, block_tokens)
        )
        at_ms += draw.exponential(1000.0 / per_s)
    return conversations


def unique_tokens(name: int, length: int) -> Tokens:
    """Return tokens that share no prefix with those of any other name."""
    return np.full(length, name, np.int32)


def _turns(profile: Profile, thinks_ms: list[float]) -> list[SimTurn]:
    turns, history_tokens = [], 0
    for index in range(profile.turns):
        shape = profile.later if index else profile.first
        prompt_tokens = history_tokens + shape.input_tokens
        turns.append(
            SimTurn(
                prompt_tokens=prompt_tokens,
                output_tokens=shape.output_tokens,
                think_ms=thinks_ms[index],
            )
        )
        history_tokens = prompt_tokens + shape.output_tokens
    return turns
