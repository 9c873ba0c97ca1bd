"""The `id:` of a server-sent event: all that any gateway needs to resume the stream after it.

Its form is `<key>.<position>[.<position>...]`, with one position `seq-char-digest` per choice
(`stream.py`), and `-e` after its end. The key is the same for all events of an answer: base64 of
a signature (HMAC-SHA256), the position of the tokens on the log, the options of the call, and its
deadline. A gateway accepts it only with this deployment's signature for the caller's API key.
Positions are not signed: they only say what the client has, and select nothing else.
"""

import base64
import binascii
import hmac
import struct
from collections.abc import Sequence
from typing import NamedTuple

from schemas.errors import InvalidRequest
from schemas.frozen import frozen
from schemas.records import Endpoint

_VERSION = 3
# Version, flags, partition, offset, created, deadline, choices, prompts.
_HEAD = struct.Struct(">BBHQIQHH")
_SIGNATURE_BYTES = 16
_USAGE, _TOKENS, _COMPLETION, _MESSAGE, _NAMES = 1, 2, 4, 8, 16
_ID_CHARS_MAX = 4_096
_NUMBER_MAX = 1 << 31


@frozen
class StreamKey:
    """The identity of an answer, the position of its first token on the log, and its format."""

    parent_id: str
    session_id: str
    model: str
    endpoint: Endpoint
    partition: int
    offset: int
    created_s: int
    deadline_ms: int
    choices: int
    tenant: str = ""  # of the caller; signed, but not in the id
    prompts: int = 1
    include_usage: bool = False
    token_ids: bool = False
    names_ids: bool = False  # log-probabilities name tokens by their ids, not by their texts
    is_message: bool = False  # in Anthropic's form; else in OpenAI's

    def pack(self) -> bytes:
        """Pack the fields that an event id carries."""
        flags = (
            _USAGE * self.include_usage
            | _TOKENS * self.token_ids
            | _COMPLETION * (self.endpoint is Endpoint.COMPLETION)
            | _MESSAGE * self.is_message
            | _NAMES * self.names_ids
        )
        head = _HEAD.pack(
            _VERSION,
            flags,
            self.partition,
            self.offset,
            self.created_s,
            self.deadline_ms,
            self.choices,
            self.prompts,
        )
        names = "\0".join((self.parent_id, self.session_id, self.model)).encode()
        return head + names


class ClientPosition(NamedTuple):
    """The part of one choice that a client has. A named tuple, because each event makes one.

    `digest` covers all tokens and text so far (`streams/calls/stream/stream.py`).
    """

    next_seq: int = 0
    next_char: int = 0
    is_ended: bool = False
    digest: int = 0


class EventIds:
    """Makes and parses event ids with the deployment's key."""

    def __init__(self, key: str, *, choices_max: int) -> None:
        self._key = key.encode()
        self._choices_max = choices_max

    def name(self, key: StreamKey) -> bytes:
        """Return the part that all ids of an answer share."""
        packed = key.pack()
        return base64.urlsafe_b64encode(self._sign(key.tenant, packed) + packed).rstrip(b"=")

    def parse(self, value: str, tenant: str) -> tuple[StreamKey, list[ClientPosition]]:
        """Parse a caller's `Last-Event-ID` into its key and positions; raises InvalidRequest."""
        try:
            if len(value) > _ID_CHARS_MAX:
                raise ValueError(f"{len(value)} characters")
            encoded, *positions = value.strip().split(".")
            raw = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
            signature, packed = raw[:_SIGNATURE_BYTES], raw[_SIGNATURE_BYTES:]
            if not hmac.compare_digest(signature, self._sign(tenant, packed)):
                raise ValueError("another signature")
            key = _unpack(packed, tenant)
            if not 1 <= key.choices <= self._choices_max or key.choices != len(positions):
                raise ValueError(f"{len(positions)} positions for {key.choices} choices")
            return key, [_position(text) for text in positions]
        except (ValueError, struct.error, binascii.Error) as error:
            raise InvalidRequest(
                "Last-Event-ID: expected the id of an event that this deployment has sent for this "
                f"API key, found {value[:60]!r}",
                "Last-Event-ID",
            ) from error

    def _sign(self, tenant: str, packed: bytes) -> bytes:
        message = b"%b\0%b" % (tenant.encode(), packed)
        return hmac.digest(self._key, message, "sha256")[:_SIGNATURE_BYTES]


def _unpack(packed: bytes, tenant: str) -> StreamKey:
    """Unpack a key whose signature was checked; raises ValueError for another version."""
    version, flags, partition, offset, created_s, deadline_ms, choices, prompts = _HEAD.unpack_from(
        packed
    )
    if version != _VERSION:
        raise ValueError(f"version {version}")
    parent_id, session_id, model = packed[_HEAD.size :].decode().split("\0")
    return StreamKey(
        parent_id=parent_id,
        session_id=session_id,
        model=model,
        endpoint=Endpoint.COMPLETION if flags & _COMPLETION else Endpoint.CHAT,
        partition=partition,
        offset=offset,
        created_s=created_s,
        deadline_ms=deadline_ms,
        choices=choices,
        tenant=tenant,
        prompts=prompts,
        include_usage=bool(flags & _USAGE),
        token_ids=bool(flags & _TOKENS),
        is_message=bool(flags & _MESSAGE),
        names_ids=bool(flags & _NAMES),
    )


def _position(text: str) -> ClientPosition:
    seq, char, digest, *flags = text.split("-")
    position = ClientPosition(int(seq), int(char), flags == ["e"], int(digest, 16))
    numbers = (position.next_seq, position.next_char, position.digest >> 1)
    if not (flags in ([], ["e"]) and all(0 <= number < _NUMBER_MAX for number in numbers)):
        raise ValueError(f"position {text[:20]!r}")
    return position


def positions_text(positions: Sequence[ClientPosition]) -> bytes:
    """Return the part of the id that changes with each event."""
    return b".".join(
        b"%d-%d-%x%b" % (p.next_seq, p.next_char, p.digest, b"-e" if p.is_ended else b"")
        for p in positions
    )
