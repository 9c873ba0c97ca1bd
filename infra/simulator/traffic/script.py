"""What clients will say and engines will answer, fixed before a run begins.

Tokens stand for themselves only: what matters is which prompts share which beginnings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.prefix import chain, salt_of

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimTurn:
    """One request: it sends the conversation's first tokens and gets the next ones."""

    prompt_tokens: int
    output_tokens: int
    think_ms: float = 0.0  # between the last answer's end and this prompt
    grammar_chars: int = 0  # of what constrains the answer, which goes with request and work


@dataclass(frozen=True, slots=True, eq=False)
class SimConversation:
    """`tokens` holds everything that is said; `hashes` names its blocks, for engines' caches.

    One that goes on with a session that others began has a name of its own.
    """

    name: str
    session_id: str
    at_ms: float
    turns: Sequence[SimTurn]
    tokens: Tokens
    hashes: list[int]
    turns_before: int = 0
    tenant: str = ""
    cache_scope: str = ""


def conversation(
    name: str,
    at_ms: float,
    turns: Sequence[SimTurn],
    tokens: Tokens,
    block_tokens: int,
    *,
    session_id: str = "",
    turns_before: int = 0,
    tenant: str = "",
    cache_scope: str = "",
) -> SimConversation:
    """With the block names worked out; tokens has shape (last prompt + its answer,)."""
    last = turns[-1]
    assert len(tokens) == last.prompt_tokens + last.output_tokens
    hashes: list[int] = chain(tokens, block_tokens, salt_of(cache_scope)).tolist()
    return SimConversation(
        *(name, session_id or name, at_ms, turns, tokens, hashes, turns_before),
        tenant=tenant,
        cache_scope=cache_scope,
    )
