"""Ids that the gateway makes: 48 bits of milliseconds and 80 random bits, in base 32.

They sort by time. The random part makes a request id unguessable; resuming relies on that. Ids of
choices have their index added.
"""

import os

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]
LENGTH = 26
_TIME_DIGITS = 10  # of 5 bits each, for the 48 bits of the time
CHAT_PREFIX, COMPLETION_PREFIX, RESPONSE_PREFIX = "chatcmpl-", "cmpl-", "resp_"
MESSAGE_PREFIX, SEARCH_PREFIX = "msg_", "fs_"  # of items of a response
IN_NO_PROMPT = (SEARCH_PREFIX, "rs_")  # of items that no prompt contains: searches, reasoning
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
    """Return the call's id in an id from a client, which may have one of OpenAI's prefixes."""
    if public_id.startswith(RESPONSE_PREFIX):  # the rest is the position of its record
        return public_id.removeprefix(RESPONSE_PREFIX).partition("_")[0]
    return public_id.removeprefix(CHAT_PREFIX).removeprefix(COMPLETION_PREFIX)
