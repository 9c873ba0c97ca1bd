"""Ids that the gateway gives out: time-ordered, 48 bits of milliseconds and 80 random bits, in
base 32.

The random part makes a request id unguessable, which resuming relies on. Ids of choices add their
index.
"""

import os

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]
LENGTH = 26
_TIME_DIGITS = 10  # of 5 bits each, which hold the 48 of the time
CHAT_PREFIX, COMPLETION_PREFIX, RESPONSE_PREFIX = "chatcmpl-", "cmpl-", "resp_"
MESSAGE_PREFIX, SEARCH_PREFIX = "msg_", "fs_"  # of items of a response
IN_NO_PROMPT = (SEARCH_PREFIX, "rs_")  # items of any server: searches and reasoning
STORE_PREFIX = "vs_"


def _make_id(now_ms: int, rest: bytes = b"") -> str:
    number = (now_ms & 0xFFFF_FFFF_FFFF) << 80 | int.from_bytes(rest or os.urandom(10), "big")
    pairs = _PAIRS
    return "".join([pairs[(number >> shift) & 1023] for shift in range(120, -1, -10)])


def new_request_id(now_ms: int) -> str:
    """The id of a call, `r` and 26 characters."""
    return "r" + _make_id(now_ms)


def new_session_id(now_ms: int) -> str:
    """The id of a conversation, `s` and 26 characters."""
    return "s" + _make_id(now_ms)


def derive_ids(now_ms: int, rest: bytes) -> tuple[str, str]:
    """A request's and a session's id that whoever has these 10 bytes makes again. The time is not
    that of a call, but of what waits to be asked, so the request's begins with `q`."""
    shared_part = _make_id(now_ms, rest)
    return "q" + shared_part, "s" + shared_part


def new_object_id(kind: str, now_ms: int) -> str:
    """The id of something that a caller keeps: a kind, as `file-` or `vs_`, and 26 characters."""
    return kind + _make_id(now_ms)


def is_id(text: str) -> bool:
    """Whether a text could be an id; what comes from a path may hold anything, even line breaks."""
    return len(text) <= 64 and text.isascii() and text.replace("-", "").isalnum()


def arrival_of(request_id: str) -> tuple[int, int] | None:
    """The first and last wall-clock millisecond at which a call with this id, or with an id that
    begins so, can have arrived; None where it is no id of ours.
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
    """Request ids of a call's choices; a single one has the call's own id."""
    return [parent_id] if choices == 1 else [f"{parent_id}-{i}" for i in range(choices)]


def from_public(public_id: str) -> str:
    """The call's id in what a client sends: bodies carry it with OpenAI's prefixes."""
    if public_id.startswith(RESPONSE_PREFIX):  # what follows says where its record lies
        return public_id.removeprefix(RESPONSE_PREFIX).partition("_")[0]
    return public_id.removeprefix(CHAT_PREFIX).removeprefix(COMPLETION_PREFIX)
