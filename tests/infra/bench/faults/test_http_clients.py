"""What clients make of streams that break, and of gateways that take nothing."""

import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from infra.bench.faults import http_clients
from infra.bench.faults.http_clients import (
    BROKEN,
    HUNG_UP,
    NOT_CONNECTED,
    WHOLE,
    Balanced,
    ChatQuestion,
    Resuming,
)

URLS = ["http://a", "http://b"]
QUESTION = ChatQuestion(messages=[{"role": "user", "content": "?"}], max_tokens=4)
Answer = Callable[[httpx.Request], httpx.Response]


def event(number: int, *, last: bool = False) -> str:
    choice = {"index": 0, "delta": {"content": f" {number}"}, "token_ids": [number],
              "finish_reason": "length" if last else None}  # fmt: skip
    return f"id: k.{number}\ndata: {json.dumps({'id': 'chatcmpl-r1', 'choices': [choice]})}\n\n"


class Breaking(httpx.AsyncByteStream):
    """Some events, and then nothing more."""

    def __init__(self, *events: str) -> None:
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for text in self._events:
            yield text.encode()
        raise httpx.ReadError("gone")


def asked_of(client: Any, answer: Answer) -> Any:
    """The same client, whose calls go nowhere else."""
    for number, url in enumerate(URLS):
        client._clients[number] = httpx.AsyncClient(
            base_url=url, transport=httpx.MockTransport(answer)
        )
    return client


WHOLE_ANSWER = "".join(event(n, last=n == 3) for n in range(4))


async def test_client_resumes_broken_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_clients, "_PAUSE_S", 0.0)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            return httpx.Response(200, stream=Breaking(event(0), event(1)))
        assert request.url.path == "/v1/requests/r1/events"
        assert request.headers["last-event-id"] == "k.1"
        return httpx.Response(200, text=event(2) + event(3, last=True))

    client = asked_of(Resuming(URLS, "m", random.Random(1)), answer)
    client_answer = await client.ask(QUESTION)
    await client.close()
    assert (client_answer.status, client_answer.resumes, client_answer.token_ids) == (
        WHOLE,
        1,
        [0, 1, 2, 3],
    )
    assert (client_answer.text, len(client_answer.times_s)) == (" 0 1 2 3", 4)


async def test_client_hangs_up_after_read_max() -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=WHOLE_ANSWER)

    client = asked_of(Resuming(URLS, "m", random.Random(1)), answer)
    question = ChatQuestion(messages=QUESTION.messages, max_tokens=4, read_max=2)
    client_answer = await client.ask(question)
    await client.close()
    assert (client_answer.status, client_answer.token_ids) == (HUNG_UP, [0, 1])


@pytest.mark.parametrize("refused", [503, None])
async def test_client_asks_other_gateway_after_refusal(refused: int | None) -> None:
    hosts: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        hosts.append(request.url.host)
        if len(hosts) == 1 and refused is None:
            raise httpx.ConnectError("nobody listens")
        if len(hosts) == 1 and refused:
            return httpx.Response(refused)
        return httpx.Response(200, text=WHOLE_ANSWER)

    client = asked_of(Balanced(URLS, "m", random.Random(1)), answer)
    client_answer = await client.ask(QUESTION)
    await client.close()
    assert (client_answer.status, client_answer.detail, sorted(hosts)) == (WHOLE, "", ["a", "b"])


async def test_client_does_not_repeat_broken_answer() -> None:
    hosts: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        hosts.append(request.url.host)
        return httpx.Response(200, stream=Breaking(event(0)))

    client = asked_of(Balanced(URLS, "m", random.Random(1)), answer)
    client_answer = await client.ask(QUESTION)
    await client.close()
    assert (client_answer.status, len(hosts)) == (BROKEN, 1)


async def test_client_reports_not_connected_when_all_refuse() -> None:
    client = asked_of(Balanced(URLS, "m", random.Random(1)), lambda _: httpx.Response(503))
    client_answer = await client.ask(QUESTION)
    await client.close()
    assert client_answer.status == NOT_CONNECTED
