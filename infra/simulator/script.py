"""What clients will say and engines will answer, fixed before a run begins.

Tokens stand for themselves only: what matters is which prompts share which beginnings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.prefix import chain

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request: it sends the conversation's first tokens and gets the next ones."""

    prompt_tokens: int
    output_tokens: int
    think_ms: float = 0.0  # between the last answer's end and this prompt


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """`tokens` holds everything that is said; `hashes` names its blocks, for engines' caches."""

    session_id: str
    at_ms: float
    turns: Sequence[Turn]
    tokens: Tokens
    hashes: list[int]

    @property
    def requests(self) -> int:
        return len(self.turns)


def conversation(
    session_id: str, at_ms: float, turns: Sequence[Turn], tokens: Tokens, block_tokens: int
) -> Conversation:
    """With the block names worked out; tokens has shape (last prompt + its answer,)."""
    last = turns[-1]
    assert len(tokens) == last.prompt_tokens + last.output_tokens
    hashes: list[int] = chain(tokens, block_tokens).tolist()
    return Conversation(session_id, at_ms, turns, tokens, hashes)
