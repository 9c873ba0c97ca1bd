"""Files over HTTP: by hand, and by the real `openai` package."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from schemas.errors import BrokerUnavailable
from streams.gateway.endpoints import files as files_module
from tests.streams.gateway.in_process import InProcessGateway, serving
from tests.waits import PATIENCE_S

FILES = "/v1/files"
KEYS = ("one", "two")
TEXT = b"The Ondry ferry leaves from pier 7."


async def upload(
    gateway: InProcessGateway, name: str = "a.txt", data: bytes = TEXT, **fields: Any
) -> httpx.Response:
    form = {"purpose": "user_data", **fields}
    key = form.pop("key", KEYS[0])
    async with gateway.client() as client:
        return await client.post(
            FILES,
            data={name: value for name, value in form.items() if value is not None},
            files={"file": (name, data)},
            headers={"authorization": f"Bearer {key}"},
        )


def keeping(**settings: Any) -> InProcessGateway:
    return InProcessGateway(api_keys=KEYS, **settings)


async def test_openai_client_creates_lists_reads_and_deletes_files() -> None:
    """`/v1/files` as the `openai` package uses it."""
    gateway = keeping()
    async with serving(gateway) as url:
        async with openai.AsyncOpenAI(
            base_url=url + "/v1", api_key="one", timeout=PATIENCE_S
        ) as ai:
            large = bytes(range(256)) * 12_000  # three parts
            files = [
                await ai.files.create(file=("a.txt", TEXT), purpose="user_data"),
                await ai.files.create(file=("b.bin", large), purpose="assistants"),
            ]
            assert (files[0].filename, files[0].bytes, files[0].status) == (
                *("a.txt", len(TEXT)),
                "processed",
            )
            listed = [file async for file in ai.files.list(limit=1)]
            assert [file.id for file in listed] == [file.id for file in reversed(files)]
            assert [file.id async for file in ai.files.list(purpose="user_data")] == [files[0].id]
            assert await ai.files.retrieve(files[1].id) == files[1]
            assert (await ai.files.content(files[1].id)).content == large
            assert (await ai.files.delete(files[0].id)).deleted
            with pytest.raises(openai.NotFoundError, match="no such file"):
                await ai.files.retrieve(files[0].id)
            assert [file.id async for file in ai.files.list()] == [files[1].id]


async def test_file_is_hidden_from_other_tenants() -> None:
    gateway = keeping()
    name = (await upload(gateway)).json()["id"]
    headers = {"authorization": "Bearer two"}
    async with gateway.client() as client:
        for path in (f"{FILES}/{name}", f"{FILES}/{name}/content"):
            assert (await client.get(path, headers=headers)).status_code == 404
        assert (await client.delete(f"{FILES}/{name}", headers=headers)).status_code == 404
        assert (await client.get(FILES, headers=headers)).json()["data"] == []
        assert (await client.get(FILES)).status_code == 401


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"data": b""}, 400, "file: expected a file with content, found 0 bytes"),
        ({"data": b"x" * 1_001}, 413, "file: expected at most 1000 bytes, found 1001"),
        ({"data": b"x" * 100_000}, 413, "file: expected at most 1000 bytes, found more"),
        ({"purpose": "vision"}, 400, "purpose: expected assistants or batch or user_data, found"),
        ({"purpose": None}, 400, "purpose: expected assistants or batch or user_data, found None"),
        ({"name": ".."}, 400, "file: expected a name of 1 to 255 characters"),
        ({"name": "a/"}, 400, "file: expected a name of 1 to 255 characters"),
        ({"name": "x" * 256}, 400, "file: expected a name of 1 to 255 characters"),
        ({"colour": "red"}, 400, "colour: unknown field"),
        ({"expires_after[anchor]": "created_at"}, 400, "expires_after: expected anchor"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "9"},
            *(400, "seconds from 3600 to 2592000"),
        ),
    ],
)
async def test_files_endpoint_rejects_invalid_uploads(
    fields: dict[str, Any], status: int, message: str
) -> None:
    gateway = keeping(file_bytes_max=1_000)
    response = await upload(gateway, **fields)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]
    assert not len(gateway.objects.table) and not gateway.objects.parts


@pytest.mark.parametrize(
    ("path", "filename"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\dir\\a.md", "a.md"),
        ("Grüße.txt", "Grüße.txt"),
    ],
)
async def test_upload_keeps_only_name_of_path(path: str, filename: str) -> None:
    assert (await upload(keeping(), path)).json()["filename"] == filename


def test_filename_drops_unprintable_characters() -> None:
    assert files_module._filename(" a\t\x00b\udcff.txt") == "ab.txt"


async def test_file_expires_as_requested() -> None:
    fields: Any = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file = (await upload(keeping(), **fields)).json()
    assert file["expires_at"] == file["created_at"] + 3_600


async def test_files_endpoint_rejects_malformed_forms() -> None:
    headers = {"authorization": "Bearer one"}
    async with keeping().client() as client:
        plain = await client.post(FILES, json={}, headers=headers)
        headers["content-type"] = "multipart/form-data; boundary=x"
        odd = [
            await client.post(FILES, content=content, headers=headers)
            for content in (b"", b"--x\r\nrubbish", b"--x--", b"\xff" * 99)
        ]
        no_boundary = {**headers, "content-type": "multipart/form-data"}
        odd.append(await client.post(FILES, content=b"x", headers=no_boundary))
    assert plain.status_code == 415
    assert [response.status_code for response in odd] == [400] * 5


async def test_files_endpoint_discards_incomplete_upload() -> None:
    """The client disconnects before the file is whole."""
    gateway = keeping()
    async with serving(gateway) as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\n"
            b"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 9999\r\n\r\n"
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nhalf'
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        answer = await upload(gateway)
    assert answer.status_code == 200
    assert len(gateway.objects.table) == 1


async def test_files_endpoint_limits_concurrent_uploads_per_tenant() -> None:
    """Slow uploads of one tenant leave room for those of others."""
    gateway = keeping(uploads_max=2)
    places, keys = gateway.state.callers.uploads._share, gateway.state.callers.keys
    first, second = (keys.tenant({b"authorization": b"Bearer %b" % key.encode()}) for key in KEYS)
    places.take(first, "uploads")
    response = await upload(gateway, key="one")
    assert response.status_code == 429
    assert "1 of your uploads and 0 of others" in response.json()["error"]["message"]
    assert (await upload(gateway, key="two")).status_code == 200
    places.take(second, "uploads")
    assert (await upload(gateway, key="two")).status_code == 429
    assert places.used == 2


async def test_files_endpoint_returns_503_without_broker() -> None:
    gateway = keeping()
    gateway.objects.trouble = BrokerUnavailable("objects: not acknowledged")
    response = await upload(gateway)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "broker_unavailable")
