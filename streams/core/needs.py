"""A request as placement sees it, with what was computed and drawn for it.

`streams/core/dispatcher.py` makes one per request and keeps it with the request.
"""

from dataclasses import dataclass, field

import numpy as np

from schemas.prefix import Words, chain
from schemas.records import Priority, Request, Session
from streams.core.estimates import Note
from streams.core.prefixes import PrefixIndex

UNTICKETED = 0
_PROBE_TOKENS = 2_048  # of a prompt are hashed at first


@dataclass(slots=True, eq=False, kw_only=True)
class Need:
    """A request as placement sees it. Keep one per request while it waits: it remembers what was
    computed and drawn for it. `session`, `waiting` and `underway` are as of now."""

    request_id: str
    turn: int
    prompt_tokens: int
    prompt: bytes  # packed int32
    max_tokens: int
    priority: Priority
    deadline_ms: int
    w_ttft: float = -1.0  # below 0: its class's
    w_tpot: float = -1.0
    session: Session | None = None
    waiting: int = 0  # requests in admission
    underway: int = 0  # remote placements that wait for their decode worker
    ticket: int = UNTICKETED
    note: Note | None = None  # what lay before it when it was placed
    _chains: dict[int, Words] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request) -> "Need":
        """The lasting part, from the request."""
        return cls(
            request_id=request.request_id,
            turn=request.turn,
            prompt_tokens=len(request.prompt_tokens) // 4,
            prompt=request.prompt_tokens,
            max_tokens=request.sampling.max_tokens,
            priority=request.priority,
            deadline_ms=request.deadline_ms,
            w_ttft=request.w_ttft,
            w_tpot=request.w_tpot,
        )

    def chain(self, block_size: int, index: PrefixIndex) -> Words:
        """Hashes of the prompt's blocks, all of them only if some worker holds the first few."""
        known = self._chains.get(block_size)
        if known is None:
            known = self._hashes(block_size, _PROBE_TOKENS)
        if known.size == _PROBE_TOKENS // block_size < self.prompt_tokens // block_size:
            if not index.is_held(int(known[-1]), block_size):
                return known
            known = self._hashes(block_size, self.prompt_tokens)
        return known

    def _hashes(self, block_size: int, tokens: int) -> Words:
        found = chain(
            np.frombuffer(self.prompt, "<i4", min(tokens, self.prompt_tokens)), block_size
        )
        self._chains[block_size] = found
        return found
