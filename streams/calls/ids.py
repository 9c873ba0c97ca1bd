"""Ids of calls, conversations and stored objects; which conversation a call continues.

An id has 48 bits of milliseconds and 80 random bits, in base 32. Ids sort by time. The random part
makes a request id unguessable; resuming relies on that. Ids of choices have their index added.

Theory of operation. A header names the session of a call. Otherwise the messages do: when an answer
ends, a hash over the whole conversation, answer included, is remembered with its session, here and,
by topic `turns`, on every gateway. The next turn begins with exactly these messages, so any gateway
finds the session. First turns always get a new id, so equal openings are not one session. Several
sessions may have the same messages: they are in a queue under the hash, and a turn takes the least
recently used one. If no gateway remembers the hash (it is too old, or the client changed its
messages), the id is derived from the hash up to the last answer, which is the same on every
gateway. Its limits are in `streams/gateway/README.md`.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from schemas.errors import InvalidRequest

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]
LENGTH = 26
_TIME_DIGITS = 10  # of 5 bits each, for the 48 bits of the time
CHAT_PREFIX, COMPLETION_PREFIX, RESPONSE_PREFIX = "chatcmpl-", "cmpl-", "resp_"
MESSAGE_PREFIX, SEARCH_PREFIX = "msg_", "fs_"  # of items of a response; of messages
STORE_PREFIX = "vs_"


def _make_id(now_ms: int, rest: bytes = b"") -> str:
    number = (now_ms & 0xFFFF_FFFF_FFFF) << 80 | int.from_bytes(rest or os.urandom(10), "big")
    pairs = _PAIRS
    return "".join([pairs[(number >> shift) & 1023] for shift in range(120, -1, -10)])


def new_request_id(now_ms: int) -> str:
    """Return a new id of a call, `r` and 26 characters."""
    return "r" + _make_id(now_ms)


def new_session_id(now_ms: int) -> str:
    """Return a new id of a conversation, `s` and 26 characters."""
    return "s" + _make_id(now_ms)


def derive_ids(now_ms: int, rest: bytes) -> tuple[str, str]:
    """Return a request id and a session id that can be derived again from the same 10 bytes.

    `now_ms` is not the arrival of a call but the time of a record that waits on the log, so the
    request id begins with `q`.
    """
    shared_part = _make_id(now_ms, rest)
    return "q" + shared_part, "s" + shared_part


def new_object_id(kind: str, now_ms: int) -> str:
    """Return a new id of a stored object: its kind, such as `file-` or `vs_`, and 26 characters."""
    return kind + _make_id(now_ms)


def is_id(text: str) -> bool:
    """Return whether a text can be an id. Text from a path may contain anything."""
    return len(text) <= 64 and text.isascii() and text.replace("-", "").isalnum()


def arrival_of(request_id: str) -> tuple[int, int] | None:
    """Return the first and last wall-clock millisecond at which a call with this id can have
    arrived.

    `request_id` may be the beginning of an id. Returns None if it is not an id of a gateway's call.
    """
    digits = request_id[1 : 1 + _TIME_DIGITS]
    if request_id[:1] != "r" or not digits or not set(digits) <= set(_ALPHABET):
        return None
    first = 0
    for digit in digits:
        first = first << 5 | _ALPHABET.index(digit)
    unknown_bits = 5 * (_TIME_DIGITS - len(digits))
    return first << unknown_bits, (first + 1 << unknown_bits) - 1


def choice_ids(parent_id: str, choices: int) -> list[str]:
    """Return the request ids of a call's choices; a single choice has the call's own id."""
    return [parent_id] if choices == 1 else [f"{parent_id}-{i}" for i in range(choices)]


def from_public(public_id: str) -> str:
    """Return the call's id in an id from a client, which may have a prefix of OpenAI's or
    Anthropic's."""
    for prefix in (RESPONSE_PREFIX, MESSAGE_PREFIX):
        if public_id.startswith(prefix):  # the rest is the position of its record, if it has one
            return public_id.removeprefix(prefix).partition("_")[0]
    return public_id.removeprefix(CHAT_PREFIX).removeprefix(COMPLETION_PREFIX)


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


def _chain(digest: bytes, role: str, content: str, calls: Sequence[str] = ()) -> bytes:
    """Return the hash after one more message; white space around a message does not count. `calls`
    are texts of its tool calls."""
    text = "\0".join((content.strip(), *calls)).encode("utf-8", "surrogatepass")
    head = b"%b\x00%b\x00%d\x00" % (digest, role.encode(), len(text))
    return blake2b(head + text, digest_size=16).digest()


def call_text(call_id: str | None, name: str, arguments: Any) -> str:
    """Return a text of a tool call that is the same for arguments as a text and as an object."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return json.dumps([call_id, name, arguments], sort_keys=True, ensure_ascii=False)


SESSION_IDLE_MS: Final = 3_600_000  # as long as routers know where a conversation's KV is


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

    def of_call(
        self,
        headers: Mapping[bytes, bytes],
        session_id: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        tenant: str,
        user: str,
        now_ms: int,
    ) -> Conversation:
        """Return the conversation of a call: by header, by the session id in its body, or by its
        messages; raises InvalidRequest for an invalid header."""
        session_id = session_of(headers) or session_id
        if session_id:
            turn = sum(message["role"] == "assistant" for message in messages)
            return Conversation(session_id=session_id, turn=turn)
        return self.find(f"{len(tenant)}:{tenant}{user}", messages, now_ms)

    def find(self, scope: str, messages: Sequence[Mapping[str, Any]], now_ms: int) -> Conversation:
        """Return the conversation that messages continue. `scope` separates keys and users."""
        digest = _chain(b"", "scope", scope)
        last = b""
        turn = 0
        for message in messages:
            calls = [
                call_text(call.get("id"), **call["function"])
                for call in message.get("tool_calls", ())
            ]
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
        self, conversation: Conversation, answer: str, now_ms: int, calls: Sequence[str] = ()
    ) -> ConversationTurn | None:
        """Remember the session for the next turn of a conversation; return the turn to publish, or
        None. `calls` are texts of the answer's tool calls."""
        if not conversation.digest:
            return None
        digest = _chain(conversation.digest, "assistant", answer, calls)
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
