"""Maps the prompts of a recording to substitutes, and so their block hashes and digests.

The core's own functions extend a prompt (by passages, by the answer so far), and extend its
substitute in the same way. One hash may have several substitutes: for a prompt that arrived whole,
and for an equal one that was composed. Called by `redacting.py`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from infra.replay.substitutes import FieldSubstitutes, StandIns, blank_text
from schemas.prefix import chain, salt_of
from schemas.records import Continued, Request, Retrieved
from schemas.rules.continuing import prior_answer
from schemas.rules.tokens import token_count
from streams.core.requests.context import SessionHistories, digest_of, with_context

_TOKEN_BYTES = 4
_Pair = tuple[Request, Request]  # as recorded, and with substitutes


class RedactedPrompts:
    """All prompts of a recording that have been added."""

    def __init__(
        self, stand_ins: StandIns, name: Callable[[str], str], block_sizes: Iterable[int]
    ) -> None:
        """Start without prompts; `name` returns the substitute of a name."""
        self._stand_ins = stand_ins
        self.substitutes = FieldSubstitutes(
            tokens=lambda tokens: self._inserts.get(tokens) or stand_ins.tokens(tokens),
            text=blank_text,
            digest=stand_ins.name,
            name=name,
        )
        self._block_sizes = sorted(set(block_sizes))
        self._plain: dict[str, _Pair] = {}  # by request id
        self._whole: defaultdict[str, list[_Pair]] = defaultdict(list)  # with passages, too
        self._retrieved_ids: set[str] = set()
        self._of_session: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        self._blocks: dict[int, dict[int, None]] = {}
        self._digests: dict[bytes, bytes] = {}
        self._inserts: dict[bytes, bytes] = {}

    def add(self, request: Request) -> None:
        """Add a request as it arrived, and make its substitute."""
        if request.request_id not in self._plain:
            self._plain[request.request_id] = self._add_pair(request)
            self._of_session[request.tenant, request.session_id].append(request.request_id)

    def add_live(self, request: Request, prior_tokens: int) -> None:
        """Add a request from a router's state, with `prior_tokens` of its answer at its end."""
        pair = self._add_pair(request)
        if prior_tokens:
            pair = _shorter(pair[0], prior_tokens), _shorter(pair[1], prior_tokens)
            self._whole[request.request_id].append(pair)
        self._plain.setdefault(request.request_id, pair)

    def _add_pair(self, request: Request) -> _Pair:
        pair = request, self.substitutes.replace_in(request)
        self._learn(*pair)
        self._whole[request.request_id].append(pair)
        return pair

    def add_retrieved(self, retrieved: Retrieved) -> None:
        """Add the prompt with inserted passages; only a request's first record counts."""
        name, pair = retrieved.request_id, self._plain.get(retrieved.request_id)
        if (
            retrieved.probe
            or pair is None
            or pair[0].retrieval is None
            or name in self._retrieved_ids
        ):
            return
        self._retrieved_ids.add(name)
        was, now = (
            with_context(request, record)
            for request, record in zip(
                pair, (retrieved, self.substitutes.replace_in(retrieved)), strict=True
            )
        )
        for insert, stand_in in zip(was.own_inserts, now.own_inserts, strict=True):
            self._inserts[insert.tokens] = stand_in.tokens
        self._learn(was.request, now.request)
        self._whole[name].append((was.request, now.request))

    def stand_in_answer(self, continued: Continued) -> bytes:
        """Return the substitute of an answer so far, which follows its prompt."""
        pair = self._plain.get(continued.request_id)
        plain = b"" if pair is None else pair[0].prompt_tokens
        answer = self._stand_ins.tokens(plain + continued.tokens)[len(plain) :]
        if pair is not None and prior_answer(pair[0], continued)[0]:
            for was, now in self._whole[continued.request_id]:
                self._learn(_longer(was, continued.tokens), _longer(now, answer))
        return answer

    def add_histories(self, histories: SessionHistories) -> None:
        """Map the digests by which a router knows the earlier turns of its sessions."""
        for key, history in histories.by_session.items():
            for request_id in self._of_session[key]:
                was, now = (request.prompt_tokens for request in self._plain[request_id])
                if digest_of(was[: history.plain_bytes]) == history.digest:
                    self._digests[history.digest] = digest_of(now[: history.plain_bytes])

    def digest(self, digest: bytes) -> bytes:
        """Return the substitute of a digest; for an unknown one, a digest of no session."""
        return self._digests.get(digest) or digest_of(self._stand_ins.name(digest.hex()).encode())

    def blocks(self, value: int) -> Sequence[int]:
        """Return the substitutes of a block's hash."""
        hashes = self._blocks.get(value)
        return list(hashes) if hashes else [self._stand_ins.block(value)]

    def _learn(self, was: Request, now: Request) -> None:
        for block_size in self._block_sizes:
            pairs = zip(_chain(was, block_size), _chain(now, block_size), strict=True)
            for value, name in pairs:
                self._blocks.setdefault(value, {})[name] = None


def _shorter(request: Request, prior_tokens: int) -> Request:
    prompt_bytes = (token_count(request.prompt_tokens) - prior_tokens) * _TOKEN_BYTES
    return replace(request, prompt_tokens=request.prompt_tokens[:prompt_bytes])


def _longer(request: Request, answer: bytes) -> Request:
    return replace(request, prompt_tokens=request.prompt_tokens + answer)


def _chain(request: Request, block_size: int) -> list[int]:
    packed = request.prompt_tokens
    tokens = np.frombuffer(packed, "<i4", token_count(packed))
    hashes: list[int] = chain(tokens, block_size, salt_of(request.cache_scope)).tolist()
    return hashes
