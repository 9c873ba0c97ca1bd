"""Builds prompts with passages: those retrieved for a request, and those of earlier turns.

Theory of operation. Tokens are inserted before positions of the plain prompt, so a prompt is its
plain tokens and a list of `Insert`s. The inserts of this request are `lead`, the passages with
`joint` between them and `trail` before `at`, and `tail` before `tail_at`. Passages are taken whole,
the best first, up to `tokens_max`. A passage is left out if it does not fit, has no tokens, or has
one that is `reserved` for templates. Without passages there are no inserts. Inserts of earlier
turns keep their positions, so that each prompt of a session begins with the last one, which prefix
caches need. They are taken from the first on, up to `room_tokens` for all inserts together. The
gateway chooses both limits so that prompt and answer fit the model. An insert that quotes a changed
document, or a document whose state is unknown, is left out for the rest of the session.

`SessionHistories` stores the inserts of a session's last prompt, with a digest of the plain one.
A later turn of the same tenant that begins with the same plain tokens gets the same inserts. Its
router writes them into the `Retrieved`, with the documents that changed, so a prompt follows from
two records, `Request` and `Retrieved`, and is the same after a takeover. The table is bounded, and
lost with its router; that costs a cache hit.

Pure; `streams/core/handlers/retrievals.py` and `streams/core/requests/recovery.py` use it.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from schemas.records import (
    Insert,
    Passage,
    Quoted,
    Request,
    Retrieval,
    Retrieved,
    StreamRetrieved,
)
from schemas.rules.citations import citation
from schemas.rules.sizes import HISTORY_BYTES_MAX, PASSAGES_MAX, QUOTED_MAX
from schemas.rules.tokens import is_insertable, token_count

_TOKEN_BYTES = 4
_ENTRY_BYTES = 512  # overhead of a session, besides its tokens
_DIGEST_BYTES = 16
_QUOTED_BYTES = 16  # overhead of a quoted document, besides its names


@dataclass(frozen=True, slots=True)
class PromptContext:
    """A request with its whole prompt, the inserts, and the notice for its reader."""

    request: Request
    inserts: tuple[Insert, ...]  # of earlier turns, then of this request
    own_inserts: tuple[Insert, ...]
    notice: StreamRetrieved


def with_context(request: Request, retrieved: Retrieved) -> PromptContext:
    """Return the request with the retrieved passages in its prompt."""
    retrieval = request.retrieval
    assert retrieval is not None, f"{request.request_id}: nothing was to be found"
    candidates = () if retrieved.error is not None else retrieved.passages
    passages, left_out = _choose(retrieval, candidates)
    own_inserts = _own_inserts(retrieval, passages)
    inserts = (
        *_fit(_still_valid(retrieved), retrieval.room_tokens - _tokens(own_inserts)),
        *own_inserts,
    )
    notice = StreamRetrieved(
        request_id=request.request_id,
        collection=retrieval.collection,
        citations=tuple(citation(passage) for passage in passages),
        tokens=_tokens(inserts),
        missing_shards=len(retrieved.missing),
        error=retrieved.error,
        degraded=retrieved.degraded,
        left_out=retrieved.left_out + left_out,
    )
    if not inserts:
        return PromptContext(request, (), (), notice)
    prompt = _insert(request.prompt_tokens, inserts)
    return PromptContext(replace(request, prompt_tokens=prompt), inserts, own_inserts, notice)


def beginning(request: Request, history: Sequence[Insert]) -> bytes:
    """Return the tokens with which the prompt will begin, whatever the search finds, if the quoted
    documents have not changed."""
    retrieval = request.retrieval
    assert retrieval is not None, f"{request.request_id}: nothing is to be found"
    around = (retrieval.lead, retrieval.trail, retrieval.tail)
    own_tokens = sum(map(token_count, around)) + retrieval.tokens_max
    own_tokens += min(retrieval.k, PASSAGES_MAX) * token_count(retrieval.joint)
    plain = request.prompt_tokens[: max(0, retrieval.at) * _TOKEN_BYTES]
    return _insert(plain, _fit(history, retrieval.room_tokens - own_tokens))


def _choose(retrieval: Retrieval, passages: Sequence[Passage]) -> tuple[list[Passage], int]:
    """Return the best passages that fit, and how many were skipped until there were enough.

    `tokens_max` does not count `lead`, `joint`, `trail` and `tail`.
    """
    left_tokens, left_out = retrieval.tokens_max, 0
    chosen: list[Passage] = []
    for passage in passages:
        if len(chosen) >= min(retrieval.k, PASSAGES_MAX):
            break
        needed = token_count(passage.tokens)
        if needed <= left_tokens and is_insertable(passage.tokens, retrieval.reserved):
            chosen.append(passage)
            left_tokens -= needed
        else:
            left_out += 1
    return chosen, left_out


def _own_inserts(retrieval: Retrieval, passages: Sequence[Passage]) -> tuple[Insert, ...]:
    if not passages:
        return ()
    between = retrieval.joint.join(passage.tokens for passage in passages)
    quoted = tuple({Quoted(document_id=p.document_id, content=p.content): None for p in passages})
    tokens = retrieval.lead + between + retrieval.trail
    inserts = [Insert(at=retrieval.at, tokens=tokens, quoted=quoted)]
    if retrieval.tail:  # instructions on how to use the passages
        inserts.append(Insert(at=retrieval.tail_at, tokens=retrieval.tail, quoted=quoted))
    return tuple(inserts)


def quoted_in(inserts: Sequence[Insert]) -> tuple[Quoted, ...]:
    """Return the documents that the inserts quote, each quoted version once."""
    return tuple({quoted: None for insert in inserts for quoted in insert.quoted})


def _still_valid(retrieved: Retrieved) -> Sequence[Insert]:
    """Return the inserts of earlier turns without those that quote changed documents. If the search
    failed, the changes are unknown, and all inserts with quotes are left out."""
    changed_ids, knows = frozenset(retrieved.changed), retrieved.error is None
    return [
        insert
        for insert in retrieved.history
        if not insert.quoted
        or (knows and changed_ids.isdisjoint(quoted.document_id for quoted in insert.quoted))
    ]


def _fit(history: Sequence[Insert], room_tokens: int) -> tuple[Insert, ...]:
    """Return the inserts, from the first on, that fit into `room_tokens`."""
    inserts: list[Insert] = []
    for insert in history:
        room_tokens -= token_count(insert.tokens)
        if room_tokens < 0:
            break
        inserts.append(insert)
    return tuple(inserts)


def _tokens(inserts: Sequence[Insert]) -> int:
    return sum(token_count(insert.tokens) for insert in inserts)


def _insert(plain: bytes, inserts: Sequence[Insert]) -> bytes:
    parts, copied_to = [], 0
    for insert in sorted(inserts, key=lambda insert: insert.at):
        at = min(max(insert.at * _TOKEN_BYTES, copied_to), len(plain))
        parts += [plain[copied_to:at], insert.tokens]
        copied_to = at
    return b"".join([*parts, plain[copied_to:]])


@dataclass(frozen=True, slots=True)
class SessionHistory:
    """The inserts of a session's last prompt, and a digest of the plain prompt."""

    partition: int
    plain_bytes: int
    digest: bytes
    inserts: tuple[Insert, ...]
    cost_bytes: int


_Key = tuple[str, str]  # tenant and session: tenants never see each other's passages


class SessionHistories:
    """The inserts of sessions' last prompts; evicts the oldest prompt first."""

    def __init__(self, *, sessions_max: int, bytes_max: int) -> None:
        self._sessions_max, self._bytes_max = sessions_max, bytes_max
        self._histories: OrderedDict[_Key, SessionHistory] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._histories)

    @property
    def by_session(self) -> Mapping[_Key, SessionHistory]:
        """Return all stored histories by tenant and session."""
        return self._histories

    def inserts_of(self, request: Request) -> tuple[Insert, ...]:
        """Return the inserts of earlier turns, if the plain prompt begins with theirs."""
        history, retrieval = self._histories.get(_key(request)), request.retrieval
        if history is None or retrieval is None:
            return ()
        if history.plain_bytes > _TOKEN_BYTES * min(retrieval.history_tokens, retrieval.at):
            return ()
        same = digest_of(request.prompt_tokens[: history.plain_bytes]) == history.digest
        return history.inserts if same else ()

    def remember(self, request: Request, inserts: tuple[Insert, ...], partition: int) -> None:
        """Store the inserts of a session's current prompt; `request` has the plain prompt."""
        self._forget(_key(request))
        insert_bytes = sum(_bytes_of(insert) for insert in inserts)
        cost_bytes = _ENTRY_BYTES + insert_bytes
        if not inserts or insert_bytes > HISTORY_BYTES_MAX or cost_bytes > self._bytes_max:
            return
        if len(quoted_in(inserts)) > QUOTED_MAX:
            return
        plain = request.prompt_tokens
        history = SessionHistory(partition, len(plain), digest_of(plain), inserts, cost_bytes)
        self._histories[_key(request)] = history
        self._bytes += cost_bytes
        while len(self._histories) > self._sessions_max or self._bytes > self._bytes_max:
            self._forget(next(iter(self._histories)))

    def drop(self, partition: int) -> None:
        """Drop a partition's histories, because another router owns its sessions now."""
        for key in [
            key for key, history in self._histories.items() if history.partition == partition
        ]:
            self._forget(key)

    def _forget(self, key: _Key) -> None:
        history = self._histories.pop(key, None)
        if history is not None:
            self._bytes -= history.cost_bytes


def _bytes_of(insert: Insert) -> int:
    """Return an insert's size; names count twice, as changed documents are named once more."""
    names = sum(
        2 * len(quoted.document_id.encode()) + len(quoted.content) + _QUOTED_BYTES
        for quoted in insert.quoted
    )
    return len(insert.tokens) + names


def _key(request: Request) -> _Key:
    return request.tenant, request.session_id


def digest_of(plain: bytes) -> bytes:
    """Return the digest by which a plain prompt's beginning is recognised."""
    return blake2b(plain, digest_size=_DIGEST_BYTES).digest()
