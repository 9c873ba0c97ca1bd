"""Decodes compressed request bodies in pieces while they are read.

So the limits of bodies (`entry.py`, `uploads.py`) apply to the decoded size, and no piece blocks
other calls for long.
"""

import asyncio
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

import brotli
from starlette.types import Message, Receive, Scope

from schemas.errors import InvalidRequest, UnsupportedMedia

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

HEADER = b"content-encoding"
_PIECE_BYTES = 64 << 10
_SLICE_BYTES = 16 << 10  # of input: each member copies the rest of its slice
# Bounds for bodies that decode to little: no compressor makes a body more than twice its size.
_BYTES_MORE = 1 << 20
_MEMBERS_MORE, _MEMBER_BYTES = 1_000, 16 << 10  # each further member needs that output
_WINDOW: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 23}  # RFC 9659: 8 MiB
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
_Failed = (zlib.error, zstd.ZstdError, brotli.error)


class BodyDecoder(Protocol):
    """Decodes the compressed body of one request."""

    members: int  # number of members or frames begun

    @property
    def is_whole(self) -> bool:
        """Return whether every member that was begun is complete."""

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield the decoded bytes in bounded pieces, some empty; raises one of `_Failed`."""


class _Zlib:
    """Decodes gzip with one or more members, and deflate, with or without zlib's header."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self.members = 0
        self._stream: zlib._Decompress | None = None

    @property
    def is_whole(self) -> bool:
        return self._stream is not None and self._stream.eof

    def pieces(self, data: bytes) -> Iterator[bytes]:
        while data:
            stream = self._stream
            if stream is None or stream.eof:
                self.members += 1
                has_head = self._bits == _GZIP or data[0] & 15 == zlib.DEFLATED
                stream = self._stream = zlib.decompressobj(self._bits if has_head else _RAW)
            piece = stream.decompress(data, _PIECE_BYTES)
            yield piece
            while len(piece) == _PIECE_BYTES and not (stream.unconsumed_tail or stream.eof):
                piece = stream.decompress(b"", _PIECE_BYTES)  # of input that it has read
                yield piece
            data = stream.unconsumed_tail or stream.unused_data


class _Zstd:
    """Decodes Zstandard with one or more frames."""

    def __init__(self) -> None:
        self.members = 1
        self._stream = zstd.ZstdDecompressor(options=_WINDOW)

    @property
    def is_whole(self) -> bool:
        return self._stream.eof

    def pieces(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._stream.eof:
                self.members += 1
                self._stream = zstd.ZstdDecompressor(options=_WINDOW)
            yield self._stream.decompress(data, _PIECE_BYTES)
            while not (self._stream.needs_input or self._stream.eof):
                yield self._stream.decompress(b"", _PIECE_BYTES)
            data = self._stream.unused_data if self._stream.eof else b""


class _Brotli:
    def __init__(self) -> None:
        self.members = 1
        self._stream = brotli.Decompressor()

    @property
    def is_whole(self) -> bool:
        return bool(self._stream.is_finished())

    def pieces(self, data: bytes) -> Iterator[bytes]:
        while piece := self._stream.process(data, output_buffer_limit=_PIECE_BYTES):
            yield piece
            data = b""  # the decompressor has the rest


_DECODERS: dict[str, Callable[[], BodyDecoder]] = {
    "gzip": lambda: _Zlib(_GZIP),
    "x-gzip": lambda: _Zlib(_GZIP),
    "deflate": lambda: _Zlib(_ZLIB),
    "zstd": _Zstd,
    "br": _Brotli,
}
ACCEPTED = b"gzip, deflate, zstd, br"


def encoding_of(scope: Scope) -> str:
    """Return the encoding of a call's body, or an empty text; raises UnsupportedMedia."""
    values = [value for name, value in scope["headers"] if name == HEADER]
    name = b",".join(values).decode("latin-1").strip().lower()
    if name in ("", "identity"):
        return ""
    if name not in _DECODERS:
        raise UnsupportedMedia(
            f"Content-Encoding: expected one of {ACCEPTED.decode()}, found {name[:60]!r}"
        )
    return name


def decode_body(encoding: str, receive: Receive) -> Receive:
    """Return a `receive` that decodes the body of a call; an empty body is complete.

    It raises InvalidRequest if the body cannot be decoded, or becomes so little that the limits of
    bodies would never end it.
    """
    decoder = _DECODERS[encoding]()
    pieces: Iterator[bytes] = iter(())
    is_read = is_over = False
    bytes_read = bytes_made = 0

    def decoded_pieces(body: bytes) -> Iterator[bytes]:
        nonlocal bytes_read
        for at in range(0, len(body), _SLICE_BYTES):
            part = body[at : at + _SLICE_BYTES]
            yield from decoder.pieces(part)
            bytes_read += len(part)
            if bytes_read > 2 * bytes_made + _BYTES_MORE:
                raise refusal(f"{bytes_read} bytes become {bytes_made}")
            if decoder.members > _MEMBERS_MORE + bytes_made // _MEMBER_BYTES:
                raise refusal(f"{decoder.members} parts become {bytes_made} bytes")

    def refusal(why: object) -> InvalidRequest:
        return InvalidRequest(
            f"Content-Encoding: expected a body in {encoding}, found none: {why}",
            "Content-Encoding",
        )

    async def receive_decoded() -> Message:
        nonlocal pieces, is_read, is_over, bytes_made
        while not is_over:
            try:
                for piece in pieces:
                    await asyncio.sleep(0)  # a few bytes may decode to very many
                    if piece:
                        bytes_made += len(piece)
                        return {"type": "http.request", "body": piece, "more_body": True}
            except _Failed as error:
                raise refusal(error) from error
            if is_read:
                if bytes_read and not decoder.is_whole:
                    raise refusal("it ends too early")
                is_over = True
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await receive()
            if message["type"] != "http.request":
                return message
            is_read = not message.get("more_body", False)
            pieces = decoded_pieces(message.get("body", b""))
        return await receive()

    return receive_decoded
