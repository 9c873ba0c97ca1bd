"""A case: the input of placement for one request, and what placement computed for it.

`streams/core/handlers/dispatch.py` makes one per request, which keeps it while it waits and runs
(`requests/live.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from schemas.frozen import frozen
from schemas.prefix import Words, chain, salt_of
from schemas.records import Request, Session, Unmet
from schemas.rules.tokens import token_count

UNTICKETED = 0
_PROBE_TOKENS = 2_048  # tokens of a prompt that are hashed at first
_NOTHING: Words = np.empty(0, np.uint64)

Features = tuple[float, ...]


@dataclass(slots=True)
class PlacementNote:
    """The load before a request when it was placed, and what was measured of it so far.

    `streams/core/placement/estimates.py` writes and reads it.
    """

    at_ms: int
    max_tokens: int
    prompt_tokens: int = 0
    prefill: Features = ()  # without the tokens to compute, which the worker reports
    append: Features = ()
    decode: tuple[str, int] = ("", 0)  # the decode worker's id and epoch
    running: float = 0.0  # requests on the decode worker when this one was placed
    batch_tokens: int = 0  # likewise, tokens of context
    appended_tokens: float = 0.0  # likewise, total of `Worker.appended_tokens`
    moved_tokens: int = 0  # prompt tokens whose KV the decode worker lacks
    prefill_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmetWishes:
    """The wishes that a placement does not meet, and why; empty texts mean met."""

    policy: str = ""
    orchestration: str = ""
    unmet: Unmet = Unmet.NONE


ALL_MET = UnmetWishes()


@frozen
class WarmedPrefix:
    """A prompt's beginning that a worker was ordered to prefill."""

    life: tuple[str, int]
    tokens: int  # in whole blocks


@dataclass(slots=True, eq=False)
class RequestCase:
    """The input of placement; each call updates `session`, `waiting` and `before_decode`."""

    request: Request
    prompt_tokens: int
    max_tokens: int  # still to generate
    session: Session | None = None
    waiting: int = 0  # requests in admission
    before_decode: int = 0  # remote placements that wait for their decode worker
    ticket: int = UNTICKETED  # number of its choice between local and remote, from 1
    note: PlacementNote | None = None
    weights: tuple[float, float] | None = None  # of TTFT and TPOT, by its class or its own
    policy: str = ""  # the policy that places it
    warm: WarmedPrefix | None = None  # its beginning, prefilled during its search
    _chains: dict[int, Words] = field(default_factory=dict)

    @classmethod
    def from_request(cls, request: Request, prior_tokens: int = 0) -> "RequestCase":
        """Build a case; the last `prior_tokens` of the prompt belong to the answer."""
        max_tokens = request.sampling.max_tokens - prior_tokens
        return cls(request, token_count(request.prompt_tokens), max_tokens)

    def chain(self, block_size: int, is_held: Callable[[int, int], bool]) -> Sequence[int]:
        """Return hashes of the prompt's first blocks, as far as a worker may have them cached.

        More are computed only while the last one so far is cached: `is_held(hash, tokens)`, where
        `tokens` is the length of the prompt's part that the hash stands for.
        """
        salt = salt_of(self.request.cache_scope)
        hashes = self._chains.get(block_size, _NOTHING)
        hashed_tokens, last = hashes.size * block_size, hashes.item(-1) if hashes.size else None
        while self.prompt_tokens - hashed_tokens >= block_size:
            if last is not None and not is_held(last, hashed_tokens):
                break
            count = min(
                max(hashed_tokens, _PROBE_TOKENS, block_size), self.prompt_tokens - hashed_tokens
            )
            tokens = np.frombuffer(self.request.prompt_tokens, "<i4", count, 4 * hashed_tokens)
            new_hashes = chain(tokens, block_size, salt if last is None else last, hashed_tokens)
            hashes = new_hashes if last is None else np.concatenate([hashes, new_hashes])
            self._chains[block_size] = hashes
            hashed_tokens, last = hashes.size * block_size, hashes.item(-1)
        return hashes.data  # few of them are read, and a list would convert all to integers
