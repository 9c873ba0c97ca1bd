"""Scripts of conversations: prompts and answers, fixed before a run begins.

Tokens have no meaning: only which prompts share which prefixes matters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from infra.simulator.models import MODEL
from schemas.prefix import chain, salt_of

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimTurn:
    """One request: it sends the conversation's first tokens, and its answer has the next ones."""

    prompt_tokens: int
    output_tokens: int
    think_ms: float = 0.0  # between the end of the last answer and this prompt
    grammar_chars: int = 0  # length of the grammar, which the request and its work carry
    model: str = MODEL
    adapter: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class SimConversation:
    """A conversation; `tokens` has all prompts and answers, `hashes` the hashes of its blocks
    without an adapter.

    One that continues the session of another conversation has a name of its own.
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
    """Return a conversation with its block hashes; `tokens` has shape (last prompt + its
    answer,)."""
    last = turns[-1]
    assert len(tokens) == last.prompt_tokens + last.output_tokens
    hashes: list[int] = chain(tokens, block_tokens, salt_of(cache_scope)).tolist()
    return SimConversation(
        *(name, session_id or name, at_ms, turns, tokens, hashes, turns_before),
        tenant=tenant,
        cache_scope=cache_scope,
    )
