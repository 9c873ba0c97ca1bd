"""Who may call: names that lead here, web pages in somebody's browser, and keys."""

from typing import Any

import pytest

from tests.streams.gateway.in_process import InProcessGateway, call, http_client, serving
from tests.streams.gateway.samples import MODEL, chat

CHATS, PAGE = "/v1/chat/completions", "https://page.example"


async def status(name: str, path: str = "/v1/models", **settings: Any) -> int:
    """What a call with this `Host` gets over a real socket at 127.0.0.1."""
    async with serving(InProcessGateway(**settings)) as url, http_client(url) as client:
        port = url.rpartition(":")[2]
        response = await client.get(path, headers={"host": name.replace("PORT", port)})
    if response.status_code == 403:
        assert response.json()["error"]["code"] == "forbidden"
        assert "gateway.allowed_hosts" in response.json()["error"]["message"]
    return response.status_code


@pytest.mark.parametrize("host", ["127.0.0.1:PORT", "localhost", "LocalHost:1", "[::1]:PORT"])
async def test_gateway_accepts_loopback_hosts(host: str) -> None:
    """Any port is accepted, so tunnels work."""
    assert await status(host) == 200


@pytest.mark.parametrize(
    "host",
    ["page.example", "page.example:PORT", "127.0.0.1.page.example", "x@localhost", "[::1", "", "*"],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/docs"])
async def test_gateway_rejects_foreign_hosts(host: str, path: str) -> None:
    """A page whose name was rebound to this address can read nothing."""
    assert await status(host, path) == 403


async def test_settings_allow_host_names() -> None:
    assert await status("LLM.example:80", allowed_hosts=("llm.example",)) == 200
    assert await status("other.example", allowed_hosts=("llm.example",)) == 403
    assert await status("other.example", allowed_hosts=("*",)) == 200
    assert await status("gateway-7", host="gateway-7") == 200, "the bound address"


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("path", [CHATS, "/v1/completions", "/tokenize"])
async def test_gateway_requires_json_content_type(kind: str | None, path: str) -> None:
    """Browsers send other bodies for any page, without a preflight request."""
    gateway = InProcessGateway()
    async with gateway.client() as client:
        headers = {} if kind is None else {"content-type": kind}
        response = await client.post(path, content=b"{}", headers=headers)
    assert response.status_code == 415
    assert "expected application/json" in response.json()["error"]["message"]
    assert not gateway.log.sent_records


@pytest.mark.parametrize("origin", [PAGE, "null", "http://gateway:81", "https://gateway"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", CHATS), ("DELETE", "/v1/requests/r1"), ("GET", "/v1/models"), ("OPTIONS", CHATS)],
)
async def test_gateway_rejects_foreign_origins(origin: str, method: str, path: str) -> None:
    """It rejects preflight requests, too, and calls that would fail anyway."""
    gateway = InProcessGateway()
    async with gateway.client() as client:
        response = await client.request(method, path, json=chat(), headers={"origin": origin})
    assert response.status_code == 403
    assert "gateway.allowed_origins" in response.json()["error"]["message"]
    assert "access-control-allow-origin" not in response.headers
    assert not gateway.log.sent_records


async def test_gateway_accepts_own_origin() -> None:
    """The page `/docs` sends calls."""
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    async with gateway.client() as client:
        response = await client.post(CHATS, json=chat(), headers={"origin": "http://gateway"})
    assert response.status_code == 200


@pytest.mark.parametrize("allowed", [PAGE, "*"])
async def test_gateway_answers_allowed_origin_with_cors_headers(allowed: str) -> None:
    """A browser needs the preflight answer and its own origin in the response."""
    gateway = InProcessGateway(allowed_origins=(allowed,))
    gateway.answer_with("ok")
    asking = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with gateway.client() as client:
        preflight = await client.options(CHATS, headers=asking)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
        called = await client.post(CHATS, json=chat(), headers={"origin": PAGE})
        assert called.json()["choices"][0]["message"]["content"] == "ok"
        listed = await client.get("/v1/models", headers={"origin": PAGE})
        assert listed.json()["data"][0]["id"] == MODEL
    for response in (preflight, called, listed):
        assert response.headers["access-control-allow-origin"] == PAGE


async def test_gateway_requires_api_key() -> None:
    gateway = InProcessGateway(api_keys=("secret", "other"))
    gateway.answer_with("ok")
    for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": "Basic secret"}):
        status, answer = await call(gateway, chat(), **headers)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert answer["error"]["type"] == "authentication_error"
    for key in ("secret", "other"):
        assert (await call(gateway, chat(), authorization=f"Bearer {key}"))[0] == 200
    first, second = gateway.log.requests
    assert first.tenant != second.tenant
    assert "secret" not in first.tenant
    async with gateway.client() as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.delete("/v1/requests/r1")).status_code == 401
        assert (await client.get("/v1/requests/r1/events")).status_code == 401
        assert (await client.get("/health/live")).status_code == 200


async def test_internal_error_returns_500_in_openai_shape() -> None:
    gateway = InProcessGateway()

    def fail() -> list[str]:
        raise RuntimeError("a bug")

    gateway.log.problems = fail  # type: ignore[method-assign]  # a bug, put there
    async with gateway.client() as client:
        response = await client.get("/health/ready")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "a bug" not in response.text
