"""Which conversation a call belongs to, when the client does not say.

A header names the session. Otherwise it is found by what was said: when an answer ends, a hash over
the whole conversation up to and including it is remembered with its session, here and, by topic
`turns`, on every gateway. The next turn, whose messages begin with exactly that, finds it anywhere.
First turns always get a fresh id, so equal openings are not one session. Several sessions may have
said the same words: they stand in a queue under the same hash, and a next turn takes the one that
was taken longest ago.

What nobody remembers (it is too old, or was changed by its client) gets an id from the hash up to
its last answer: every gateway finds the same one. `streams/gateway/README.md` says where that
ends.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from schemas.errors import InvalidRequest
from streams.gateway.ids import new_session_id

# Ours first; then what coding agents send by themselves (Claude Code, Codex, OpenCode) and
# what Dynamo's clients do.
HEADERS = (
    b"x-session-id",
    b"x-claude-code-session-id",
    b"thread-id",
    b"session-id",
    b"session_id",
    b"x-opencode-session",
    b"x-dynamo-session-id",
)
SESSION_CHARS_MAX = 128
_SAME_WORDS_MAX = 8  # sessions remembered under one hash


class ConversationTurn(NamedTuple):
    """An answer ended: what the next turn of its conversation begins with."""

    digest: bytes
    session_id: str
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A call's place in its conversation, and what is needed to remember its answer."""

    session_id: str
    turn: int
    digest: bytes = b""  # over all messages; empty where nothing is to be remembered


def session_of(headers: Mapping[bytes, bytes]) -> str | None:
    """The session that a header names; raises InvalidRequest for one that cannot be an id."""
    for name in HEADERS:
        value = headers.get(name)
        if value is not None:
            return check_session_id(name.decode(), value.decode("latin-1").strip())
    return None


def check_session_id(name: str, text: str) -> str:
    """A session's id that `name` brought; raises InvalidRequest for one that cannot be."""
    if 0 < len(text) <= SESSION_CHARS_MAX and text.isascii() and text.isprintable():
        return text
    raise InvalidRequest(
        f"{name}: expected 1 to {SESSION_CHARS_MAX} printable ASCII characters, "
        f"found {text[:40]!r}",
        name,
    )


def _chain(digest: bytes, role: str, content: str, calls: object = ()) -> bytes:
    """The hash after one more message; space around a message does not count."""
    text = (content.strip() + (repr(calls) if calls else "")).encode("utf-8", "surrogatepass")
    head = b"%b\x00%b\x00%d\x00" % (digest, role.encode(), len(text))
    return blake2b(head + text, digest_size=16).digest()


class Conversations:
    """The bounded table from hashes to sessions; the least recently used go first.

    An entry takes about 340 bytes, so the table's bound says what it takes in all.
    """

    def __init__(self, *, entries_max: int, idle_ms: int) -> None:
        self._entries_max = entries_max
        self._idle_ms = idle_ms
        self._table: OrderedDict[bytes, tuple[int, tuple[str, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._table)

    def find(self, scope: str, messages: Sequence[Mapping[str, Any]], now_ms: int) -> Conversation:
        """The conversation that these messages continue. `scope` keeps keys and users apart."""
        digest = _chain(b"", "scope", scope)
        last = b""
        turn = 0
        for message in messages:
            calls = message.get("tool_calls", ())
            digest = _chain(digest, message["role"], message["content"], calls)
            if message["role"] == "assistant":
                turn += 1
                last = digest
        if not turn:
            return Conversation(session_id=new_session_id(now_ms), turn=0, digest=digest)
        session_id = self._take(last, now_ms) or "s" + last.hex()[:26]
        return Conversation(session_id=session_id, turn=turn, digest=digest)

    def _take(self, digest: bytes, now_ms: int) -> str | None:
        entry = self._table.get(digest)
        if entry is None or now_ms - entry[0] > self._idle_ms:
            return None
        session_id, *rest = entry[1]
        self._table[digest] = (now_ms, (*rest, session_id))
        self._table.move_to_end(digest)
        return session_id

    def remember(
        self, conversation: Conversation, answer: str, now_ms: int
    ) -> ConversationTurn | None:
        """Let the next turn of this conversation find it; returns what others are to be told."""
        if not conversation.digest:
            return None
        digest = _chain(conversation.digest, "assistant", answer)
        turn = ConversationTurn(digest=digest, session_id=conversation.session_id, at_ms=now_ms)
        self.add(turn)
        return turn

    def add(self, turn: ConversationTurn) -> None:
        """Know what a gateway has remembered; also again."""
        at_ms, sessions = self._table.pop(turn.digest, (0, ()))
        if turn.session_id not in sessions:
            sessions = (turn.session_id, *sessions)[:_SAME_WORDS_MAX]
        self._table[turn.digest] = (max(at_ms, turn.at_ms), sessions)
        while len(self._table) > self._entries_max:
            self._table.popitem(last=False)
