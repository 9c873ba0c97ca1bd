"""The `id:` of a server-sent event: all that any gateway needs to resume the stream after it.

`<key>.<position>[.<position>...]`, one position per choice, `seq-char` or `seq-char-e` after its
end. The key is the same for all events of an answer: base64 of where the tokens lie on the log and
how they were asked for. Opaque to clients; what comes back is checked like any other input.
"""

import base64
import binascii
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from schemas.errors import InvalidRequest
from schemas.records import Endpoint
from streams.gateway.sessions import SESSION_CHARS_MAX

_VERSION = 1
_HEAD = struct.Struct(">BBHQIHH")  # version, flags, partition, offset, created, choices, prompts
_USAGE, _TOKENS, _COMPLETION = 1, 2, 4
_ID_CHARS_MAX = 4_096
_PARENT = re.compile(r"r[0-9a-z]{26}")
_NUMBER_MAX = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKey:
    """Which answer, where its tokens begin on the log, and how it is to be written."""

    parent_id: str
    session_id: str
    model: str
    endpoint: Endpoint
    partition: int
    offset: int
    created_s: int
    choices: int
    prompts: int = 1
    include_usage: bool = False
    token_ids: bool = False

    def encode(self) -> bytes:
        """The part of the id that all events share."""
        flags = (
            _USAGE * self.include_usage
            | _TOKENS * self.token_ids
            | _COMPLETION * (self.endpoint is Endpoint.COMPLETION)
        )
        head = _HEAD.pack(
            _VERSION,
            flags,
            self.partition,
            self.offset,
            self.created_s,
            self.choices,
            self.prompts,
        )
        names = "\0".join((self.parent_id, self.session_id, self.model)).encode()
        return base64.urlsafe_b64encode(head + names).rstrip(b"=")


class Position(NamedTuple):
    """What a client has of one choice. A named tuple, because one is made for every event."""

    next_seq: int = 0
    next_char: int = 0
    ended: bool = False


def parse(value: str, *, choices_max: int) -> tuple[StreamKey, list[Position]]:
    """The key and positions in a `Last-Event-ID`; raises InvalidRequest."""
    try:
        if len(value) > _ID_CHARS_MAX:
            raise ValueError(f"{len(value)} characters")
        encoded, *positions = value.strip().split(".")
        key = _key(encoded)
        if not 1 <= key.choices <= choices_max or key.choices != len(positions):
            raise ValueError(f"{len(positions)} positions for {key.choices} choices")
        if not key.prompts or key.choices % key.prompts:
            raise ValueError(f"{key.choices} choices of {key.prompts} prompts")
        return key, [_position(text) for text in positions]
    except (ValueError, struct.error, binascii.Error) as error:
        raise InvalidRequest(
            f"Last-Event-ID: expected the id of an event of this API, found {value[:60]!r}",
            "Last-Event-ID",
        ) from error


def _key(encoded: str) -> StreamKey:
    raw = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    version, flags, partition, offset, created_s, choices, prompts = _HEAD.unpack_from(raw)
    if version != _VERSION:
        raise ValueError(f"version {version}")
    parent_id, session_id, model = raw[_HEAD.size :].decode().split("\0")
    if not _PARENT.fullmatch(parent_id) or not 0 < len(session_id) <= SESSION_CHARS_MAX:
        raise ValueError("bad names")
    if offset >= 1 << 62:
        raise ValueError(f"offset {offset}")
    return StreamKey(
        parent_id=parent_id,
        session_id=session_id,
        model=model,
        endpoint=Endpoint.COMPLETION if flags & _COMPLETION else Endpoint.CHAT,
        partition=partition,
        offset=offset,
        created_s=created_s,
        choices=choices,
        prompts=prompts,
        include_usage=bool(flags & _USAGE),
        token_ids=bool(flags & _TOKENS),
    )


def _position(text: str) -> Position:
    seq, char, *rest = text.split("-")
    found = Position(int(seq), int(char), rest == ["e"])
    if not (rest in ([], ["e"]) and 0 <= found.next_seq < _NUMBER_MAX > found.next_char >= 0):
        raise ValueError(f"position {text[:20]!r}")
    return found


def positions_text(positions: Sequence[Position]) -> bytes:
    """The part of the id that changes."""
    return b".".join(
        b"%d-%d%b" % (p.next_seq, p.next_char, b"-e" if p.ended else b"") for p in positions
    )
