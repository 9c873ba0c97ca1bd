"""A request as placement sees it, with what was computed and drawn for it.

`streams/core/handlers/dispatch.py` makes one per request and keeps it with the request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from schemas.prefix import Words, chain
from schemas.records import Request, Session
from streams.core.placement.estimates import Note
from streams.core.placement.prefixes import NO_SLOT, PrefixIndex

UNTICKETED = 0
_PROBE_TOKENS = 2_048  # of a prompt are hashed at first
_NOTHING: Words = np.empty(0, np.uint64)


@dataclass(slots=True, eq=False)
class Need:
    """A request as placement sees it. Keep one per request while it waits: it remembers what was
    computed and drawn for it. `session`, `waiting` and `underway` are as of now."""

    request: Request
    prompt_tokens: int
    max_tokens: int
    session: Session | None = None
    waiting: int = 0  # requests in admission
    underway: int = 0  # remote placements that wait for their decode worker
    ticket: int = UNTICKETED
    note: Note | None = None  # what lay before it when it was placed
    weights: tuple[float, float] | None = None  # of TTFT and TPOT, by its class or its own
    policy: str = ""  # by which it is being placed
    _chains: dict[int, Words] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request) -> "Need":
        """The lasting part, from the request."""
        return cls(request, request.prompt_length, request.sampling.max_tokens)

    def chain(
        self, block_size: int, index: PrefixIndex, home_slot: int, home_tokens: int
    ) -> Sequence[int]:
        """Hashes of the prompt's first blocks, as far as somebody may hold them.

        More are computed only while some worker holds the last one so far. The session's worker
        does not count where it is known anyway to hold so many tokens.
        """
        known = self._chains.get(block_size, _NOTHING)
        done, last = known.size * block_size, known.item(-1) if known.size else None
        while self.prompt_tokens - done >= block_size:
            but_for = home_slot if done <= home_tokens else NO_SLOT
            if last is not None and not index.is_held(last, block_size, but_for):
                break
            count = min(max(done, _PROBE_TOKENS, block_size), self.prompt_tokens - done)
            tokens = np.frombuffer(self.request.prompt_tokens, "<i4", count, 4 * done)
            more = chain(tokens, block_size, last, done)
            known = more if last is None else np.concatenate([known, more])
            self._chains[block_size] = known
            done, last = known.size * block_size, known.item(-1)
        return known.data  # few of them are looked at, and a list would make integers of all
