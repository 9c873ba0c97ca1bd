"""Finds the conversation of a call if the client names none.

A header names the session. Otherwise the messages do: when an answer ends, a hash over the whole
conversation, answer included, is remembered with its session, here and, by topic `turns`, on every
gateway. The next turn begins with exactly these messages, so any gateway finds the session. First
turns always get a new id, so equal openings are not one session. Several sessions may have the same
messages: they are in a queue under the hash, and a turn takes the least recently used one.

If no gateway remembers the hash (it is too old, or the client changed its messages), the id is
derived from the hash up to the last answer, which is the same on every gateway. Its limits are in
`streams/gateway/README.md`.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from schemas.errors import InvalidRequest
from streams.calls.ids import new_session_id

# Trivium's first; then those that coding agents send (Claude Code, Codex, OpenCode), and that of
# Dynamo's clients.
HEADERS = (
    b"x-session-id",
    b"x-claude-code-session-id",
    b"thread-id",
    b"session-id",
    b"session_id",
    b"x-opencode-session",
    b"x-dynamo-session-id",
)
SESSION_IDLE_MS: Final = 3_600_000  # as long as routers know where a conversation's KV is
SESSION_CHARS_MAX = 128
_SAME_WORDS_MAX = 8  # sessions remembered under one hash


class ConversationTurn(NamedTuple):
    """The hash and the session of a conversation whose answer has ended, for its next turn."""

    digest: bytes
    session_id: str
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A call's session and turn, and the hash that is needed to remember its answer."""

    session_id: str
    turn: int
    digest: bytes = b""  # over all messages; empty if nothing is remembered


def session_of(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the session id in the headers, or None; raises InvalidRequest for an invalid one."""
    for name in HEADERS:
        value = headers.get(name)
        if value is not None:
            return check_session_id(name.decode(), value.decode("latin-1").strip())
    return None


def check_session_id(name: str, text: str) -> str:
    """Return a session id from the field or header `name`; raises InvalidRequest for an invalid
    one."""
    if 0 < len(text) <= SESSION_CHARS_MAX and text.isascii() and text.isprintable():
        return text
    raise InvalidRequest(
        f"{name}: expected 1 to {SESSION_CHARS_MAX} printable ASCII characters, "
        f"found {text[:40]!r}",
        name,
    )


def _chain(digest: bytes, role: str, content: str, calls: object = ()) -> bytes:
    """Return the hash after one more message; white space around a message does not count."""
    text = (content.strip() + (repr(calls) if calls else "")).encode("utf-8", "surrogatepass")
    head = b"%b\x00%b\x00%d\x00" % (digest, role.encode(), len(text))
    return blake2b(head + text, digest_size=16).digest()


class Conversations:
    """A bounded table from hashes to sessions; the least recently used are evicted.

    An entry takes about 340 bytes.
    """

    def __init__(self, *, entries_max: int, idle_ms: int) -> None:
        self._entries_max = entries_max
        self._idle_ms = idle_ms
        self._table: OrderedDict[bytes, tuple[int, tuple[str, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._table)

    def find(self, scope: str, messages: Sequence[Mapping[str, Any]], now_ms: int) -> Conversation:
        """Return the conversation that messages continue. `scope` separates keys and users."""
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
        """Remember the session for the next turn of a conversation; return the turn to publish, or
        None."""
        if not conversation.digest:
            return None
        digest = _chain(conversation.digest, "assistant", answer)
        turn = ConversationTurn(digest=digest, session_id=conversation.session_id, at_ms=now_ms)
        self.add(turn)
        return turn

    def add(self, turn: ConversationTurn) -> None:
        """Add a turn that a gateway has remembered; it may be added already."""
        at_ms, sessions = self._table.pop(turn.digest, (0, ()))
        if turn.session_id not in sessions:
            sessions = (turn.session_id, *sessions)[:_SAME_WORDS_MAX]
        self._table[turn.digest] = (max(at_ms, turn.at_ms), sessions)
        while len(self._table) > self._entries_max:
            self._table.popitem(last=False)
