"""Bodies that come compressed."""

import asyncio
import gzip
import io
import json
import zlib
from collections.abc import Callable
from typing import Any

import brotli
import pytest
from backports import zstd

from schemas.errors import InvalidRequest
from streams.gateway.http.encodings import decode_body
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.samples import chat

CHATS = "/v1/chat/completions"
Compress = Callable[[bytes], bytes]


def raw_deflate(data: bytes) -> bytes:
    """Without zlib's head, as some clients of HTTP always sent it."""
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


def zstd_with_size(data: bytes) -> bytes:
    """Codex sends it so."""
    return zstd.compress(data, level=3)


def in_two(compress: Compress) -> Compress:
    """Two members or frames, one behind the other."""
    return lambda data: compress(data[:3]) + compress(data[3:])


FORMS: dict[str, tuple[str, Compress]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "gzip-twice": ("gzip", in_two(gzip.compress)),
    "deflate": ("deflate", zlib.compress),
    "raw-deflate": ("deflate", raw_deflate),
    "zstd": ("zstd", zstd_with_size),
    "zstd-twice": ("zstd", in_two(zstd_with_size)),
    "br": ("br", brotli.compress),
}


@pytest.mark.parametrize("form", FORMS)
async def test_gateway_accepts_compressed_call(form: str) -> None:
    encoding, compress = FORMS[form]
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    headers = {"content-type": "application/json", "content-encoding": encoding.upper()}
    async with gateway.client() as client:
        body = json.dumps(chat("é" * 100)).encode()
        for path, call in ((CHATS, body), ("/tokenize", b'{"prompt": "hello"}')):
            response = await client.post(path, content=compress(call), headers=headers)
            assert response.status_code == 200, response.text


async def test_gateway_accepts_compressed_upload() -> None:
    form = (
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nassistants\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nferry'
        b"\r\n--x--"
    )
    headers = {"content-type": "multipart/form-data; boundary=x", "content-encoding": "gzip"}
    async with InProcessGateway().client() as client:
        stored = await client.post("/v1/files", content=gzip.compress(form), headers=headers)
        assert stored.json()["bytes"] == len(b"ferry")
        cut = await client.post("/v1/files", content=gzip.compress(form)[:-9], headers=headers)
        assert cut.status_code == 400
        assert "it ends too early" in cut.json()["error"]["message"]


@pytest.mark.parametrize("form", FORMS)
async def test_gateway_bounds_decompressed_body(form: str) -> None:
    """A few bytes may decompress to very many."""
    encoding, compress = FORMS[form]
    gateway = InProcessGateway(body_bytes_max=300_000)
    headers = {"content-type": "application/json", "content-encoding": encoding}
    async with gateway.client() as client:
        bomb = await client.post(CHATS, content=compress(b" " * 3_000_000), headers=headers)
    assert bomb.status_code == 413
    assert not gateway.state.callers.body_reader._share.used


@pytest.mark.parametrize("form", FORMS)
async def test_gateway_names_encoding_of_undecodable_body(form: str) -> None:
    encoding, compress = FORMS[form]
    gateway, whole = InProcessGateway(), compress(json.dumps(chat()).encode())
    headers = {"content-type": "application/json", "content-encoding": encoding}
    async with gateway.client() as client:
        for wrong in (b"{}", whole[:-1], b"\xff" + whole, whole + b"\xff"):
            response = await client.post(CHATS, content=wrong, headers=headers)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "Content-Encoding")
            assert f"expected a body in {encoding}, found none" in error["message"]
    assert not gateway.log.sent_records


@pytest.mark.parametrize("encoding", ["compress", "gzip, br", "utf-8"])
async def test_gateway_returns_415_for_unknown_encoding(encoding: str) -> None:
    async with InProcessGateway().client() as client:
        headers = {"content-type": "application/json", "content-encoding": encoding}
        response = await client.post(CHATS, content=b"{}", headers=headers)
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "gzip, deflate, zstd, br"
    assert (
        f"Content-Encoding: expected one of gzip, deflate, zstd, br, found '{encoding}'"
        in (response.json()["error"]["message"])
    )


@pytest.mark.parametrize("encoding", ["", "identity"])
async def test_gateway_accepts_identity_encoding(encoding: str) -> None:
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    async with gateway.client() as client:
        response = await client.post(CHATS, json=chat(), headers={"content-encoding": encoding})
    assert response.status_code == 200


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [0, 7, 65_536, 131_072, 400_000])
async def test_body_decoder_accepts_any_piece_sizes(form: str, size: int) -> None:
    """No decoded piece is large."""
    encoding, compress = FORMS[form]
    body = (b"0123456789" * (size // 10 + 1))[:size]
    packed = compress(body)
    for step in (1, 100, len(packed)):
        stream = io.BytesIO(packed)

        async def receive(stream: io.BytesIO = stream, step: int = step) -> Any:
            part = stream.read(step)
            has_rest = stream.tell() < len(packed)
            return {"type": "http.request", "body": part, "more_body": has_rest}

        read, has_more, whole = decode_body(encoding, receive), True, b""
        while has_more:
            message = await read()
            has_more, piece = message["more_body"], message["body"]
            assert len(piece) <= 128 << 10
            whole += piece
        assert whole == body


async def test_body_decoder_yields_to_event_loop() -> None:
    """A megabyte of zeros is a few hundred bytes."""
    turns, packed = [0], gzip.compress(bytes(10 << 20))

    async def receive() -> Any:
        return {"type": "http.request", "body": packed, "more_body": False}

    async def count() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    read = decode_body("gzip", receive)
    while (await read())["more_body"]:
        pass
    counting.cancel()
    assert turns[0] >= 160


# An empty member, and an empty block of one that never ends.
EMPTY = gzip.compress(b"")
NOTHING: dict[str, tuple[str, bytes, bytes]] = {
    "members": ("gzip", b"", EMPTY),
    "frames": ("zstd", b"", zstd.compress(b"")),
    "skipped frames": ("zstd", b"", b"\x50\x2a\x4d\x18\0\0\0\0"),
    "blocks": ("gzip", EMPTY[:10], b"\0\0\0\xff\xff"),
}


@pytest.mark.parametrize("form", NOTHING)
async def test_body_decoder_bounds_empty_members_and_frames(form: str) -> None:
    encoding, first, part = NOTHING[form]
    read_bytes, packed = 0, part * ((64 << 10) // len(part))

    async def receive() -> Any:
        nonlocal read_bytes
        body = packed if read_bytes else first + packed
        read_bytes += len(body)
        assert read_bytes < 2 << 20
        return {"type": "http.request", "body": body, "more_body": True}

    with pytest.raises(InvalidRequest, match="become 0"):
        await decode_body(encoding, receive)()


async def test_body_decoder_accepts_many_members() -> None:
    """Block-wise packers write them."""
    packed = gzip.compress(bytes(32 << 10), compresslevel=1) * 1_500

    async def receive() -> Any:
        return {"type": "http.request", "body": packed, "more_body": False}

    read, has_more = decode_body("gzip", receive), True
    while has_more:
        has_more = (await read())["more_body"]


@pytest.mark.parametrize("form", FORMS)
async def test_bodyless_call_may_name_encoding(form: str) -> None:
    async with InProcessGateway().client() as client:
        response = await client.get("/v1/models", headers={"content-encoding": FORMS[form][0]})
        assert response.status_code == 200
    bodies = iter([b"", b""])

    async def receive() -> Any:
        return {"type": "http.request", "body": next(bodies), "more_body": False}

    assert await decode_body(FORMS[form][0], receive)() == await receive()


async def test_body_decoder_rejects_large_zstd_window() -> None:
    """The caller would choose the memory for it (RFC 9659)."""
    options: dict[int, int] = {
        zstd.CompressionParameter.window_log: 27,
        zstd.CompressionParameter.content_size_flag: 0,
    }
    stream = zstd.ZstdCompressor(options=options)
    packed = stream.compress(b"{}") + stream.flush()

    async def receive() -> Any:
        return {"type": "http.request", "body": packed, "more_body": False}

    with pytest.raises(InvalidRequest, match="expected a body in zstd"):
        await decode_body("zstd", receive)()
