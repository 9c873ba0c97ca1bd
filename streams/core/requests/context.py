"""What is put into a prompt: passages that were found for a request, and those of earlier turns.

Theory of operation. Tokens are put in before places of the plain prompt, so a prompt is its plain
tokens and a list of `Insert`s. Those of this request are `lead`, the passages with `joint` between
them and `trail` before `at`, and `tail` before `tail_at`. Passages are taken whole, the best first,
as far as `tokens_max` goes; what does not fit, or has no tokens, or one that is `reserved` to
templates, is left out. Without any passage nothing is put in. Those of earlier turns stand where
they stood, so that a session's prompts stay
beginnings of each other, which is what prefix caches are for. They are taken from the first on, as
far as `room_tokens` goes with all that is put in. A gateway names both so that prompt and answer
fit the model. What quotes a document that has changed since, or of which nobody could be asked, is
left out, for the rest of the session.

`SessionHistories` remembers what stands in a session's last prompt, with a digest of the plain one.
A later turn of the same tenant that begins with the same plain tokens gets the same inserts. Its
router writes them into the `Retrieved`, with the documents that changed, so a prompt follows from
two records, `Request` and `Retrieved`, and is the same after a takeover. The memory is bounded, and
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
_ENTRY_BYTES = 512  # of a remembered session, beside its tokens
_DIGEST_BYTES = 16
_QUOTED_BYTES = 16  # of a quoted document, beside its names


@dataclass(frozen=True, slots=True)
class PromptContext:
    """A request with its whole prompt, what was put in, and what its reader is told of it."""

    request: Request
    inserts: tuple[Insert, ...]  # those of earlier turns, then its own
    own_inserts: tuple[Insert, ...]
    notice: StreamRetrieved


def with_context(request: Request, retrieved: Retrieved) -> PromptContext:
    """The request's prompt with what was found for it."""
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
    """What the prompt will begin with whatever is found, if the quoted documents say the same."""
    retrieval = request.retrieval
    assert retrieval is not None, f"{request.request_id}: nothing is to be found"
    around = (retrieval.lead, retrieval.trail, retrieval.tail)
    own_tokens = sum(map(token_count, around)) + retrieval.tokens_max
    own_tokens += min(retrieval.k, PASSAGES_MAX) * token_count(retrieval.joint)
    plain = request.prompt_tokens[: max(0, retrieval.at) * _TOKEN_BYTES]
    return _insert(plain, _fit(history, retrieval.room_tokens - own_tokens))


def _choose(retrieval: Retrieval, passages: Sequence[Passage]) -> tuple[list[Passage], int]:
    """The best that fit, and how many as good ones did not; for what stands around them there is
    room besides.
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
    if retrieval.tail:  # which says what to do with them
        inserts.append(Insert(at=retrieval.tail_at, tokens=retrieval.tail, quoted=quoted))
    return tuple(inserts)


def quoted_in(inserts: Sequence[Insert]) -> tuple[Quoted, ...]:
    """The documents of these, each as it was quoted, once."""
    return tuple({quoted: None for insert in inserts for quoted in insert.quoted})


def _still_valid(retrieved: Retrieved) -> Sequence[Insert]:
    """What earlier turns had put in, but for what quotes documents that are other now; where the
    search failed, nobody knows which."""
    changed_ids, knows = frozenset(retrieved.changed), retrieved.error is None
    return [
        insert
        for insert in retrieved.history
        if not insert.quoted
        or (knows and changed_ids.isdisjoint(quoted.document_id for quoted in insert.quoted))
    ]


def _fit(history: Sequence[Insert], room_tokens: int) -> tuple[Insert, ...]:
    """Return the inserts, from the first on, that there is room for."""
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
    """What stands in a session's last prompt, and a digest of the plain one."""

    partition: int
    plain_bytes: int
    digest: bytes
    inserts: tuple[Insert, ...]
    cost_bytes: int


_Key = tuple[str, str]  # tenant and session: what one tenant may see, another may not


class SessionHistories:
    """What stands in the last prompts of sessions, the least recently used first out."""

    def __init__(self, *, sessions_max: int, bytes_max: int) -> None:
        self._sessions_max, self._bytes_max = sessions_max, bytes_max
        self._histories: OrderedDict[_Key, SessionHistory] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._histories)

    @property
    def by_session(self) -> Mapping[_Key, SessionHistory]:
        """Return all remembered histories by tenant and session."""
        return self._histories

    def inserts_of(self, request: Request) -> tuple[Insert, ...]:
        """What earlier turns had put into the request's plain prompt; nothing where its history is
        not theirs."""
        history, retrieval = self._histories.get(_key(request)), request.retrieval
        if history is None or retrieval is None:
            return ()
        if history.plain_bytes > _TOKEN_BYTES * min(retrieval.history_tokens, retrieval.at):
            return ()
        same = digest_of(request.prompt_tokens[: history.plain_bytes]) == history.digest
        return history.inserts if same else ()

    def remember(self, request: Request, inserts: tuple[Insert, ...], partition: int) -> None:
        """What stands in a session's prompt now; `request` has the plain one."""
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
        """Another router owns these sessions now."""
        for key in [
            key for key, history in self._histories.items() if history.partition == partition
        ]:
            self._forget(key)

    def _forget(self, key: _Key) -> None:
        history = self._histories.pop(key, None)
        if history is not None:
            self._bytes -= history.cost_bytes


def _bytes_of(insert: Insert) -> int:
    """Twice the names of its documents: those that changed are named once more."""
    names = sum(
        2 * len(quoted.document_id.encode()) + len(quoted.content) + _QUOTED_BYTES
        for quoted in insert.quoted
    )
    return len(insert.tokens) + names


def _key(request: Request) -> _Key:
    return request.tenant, request.session_id


def digest_of(plain: bytes) -> bytes:
    """By which what a session said before is known again."""
    return blake2b(plain, digest_size=_DIGEST_BYTES).digest()
