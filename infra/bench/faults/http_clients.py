"""HTTP clients of the benchmarks that kill processes; they record their answers.

`Once` asks for a whole answer and does not retry. `Balanced` reads a stream from the first gateway
that accepts the call, as behind a load balancer, and does not retry a stream that broke. `Resuming`
resumes a broken stream with `Last-Event-ID` at any gateway. None of them checks the answers.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import httpx

from schemas.errors import NotReady, TriviumError, from_wire
from schemas.records import WireError

WHOLE, BROKEN, HUNG_UP = "whole", "broken off", "hung up"
REFUSED, NOT_CONNECTED, GAVE_UP = "refused", "not connected", "gave up"
_CHAT = "/v1/chat/completions"
_RESUME = "Last-Event-ID"
_WITH_IDS = {"X-Trivium-Event-Ids": "true"}
_PUBLIC_PREFIX = "chatcmpl-"
_PAUSE_S = 0.5  # before `Resuming` tries again
_CONNECT_S = 10.0
_ONCE_S, _ONCE_PAUSE_S = 30.0, 1.0
_DETAIL_CHARS_MAX = 300
# Idle connections close well before a stopping gateway ceases to wait for their next call.
_KEPT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatQuestion:
    """One chat that a client sends."""

    messages: Sequence[dict[str, str]]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    retrieval: Mapping[str, Any] | None = None
    read_max: int = 0  # tokens after which the client hangs up; 0: never
    stop: Sequence[str] = ()

    def body(self, model: str, *, stream: bool) -> dict[str, Any]:
        """Return the JSON body of the call."""
        body: dict[str, Any] = {
            "model": model,
            "messages": list(self.messages),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }
        if stream:
            body |= {"stream": True, "return_token_ids": True}
        body |= {"retrieval": dict(self.retrieval)} if self.retrieval else {}
        return body | ({"stop": list(self.stop)} if self.stop else {})


@dataclass(slots=True, kw_only=True)
class ClientAnswer:
    """The answer that a client received for one question."""

    client: str  # name of its class
    status: str = ""  # one of the statuses above, perhaps with a code
    detail: str = ""  # of every status except `WHOLE`
    request_id: str = ""  # of the last request for this question that a gateway answered
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)  # of each event with text
    event_id: str = ""  # of the last complete event
    breaks: int = 0  # tries that ended before the answer did
    resumes: int = 0
    asked_s: float = field(default_factory=time.monotonic)
    first_s: float = 0.0  # time of the first text
    ended_s: float = 0.0

    def read(self, event: dict[str, Any], now_s: float) -> None:
        """Add one event of the stream to the answer."""
        self.request_id = str(event.get("id", "")).removeprefix(_PUBLIC_PREFIX) or self.request_id
        for choice in event.get("choices", ()):
            if text := choice["delta"].get("content"):
                self.first_s = self.first_s or now_s
                self.ended_s = now_s
                self.times_s.append(now_s)
                self.text += text
            self.token_ids += choice.get("token_ids") or ()
            if choice.get("finish_reason"):
                self.status = WHOLE

    def read_whole(self, answer: dict[str, Any], now_s: float) -> None:
        """Take over an answer that was not streamed."""
        self.request_id = str(answer["id"]).removeprefix(_PUBLIC_PREFIX)
        self.text = answer["choices"][0]["message"]["content"]
        self.status, self.first_s, self.ended_s = WHOLE, now_s, now_s

    def fail(self, status: str, detail: object) -> "ClientAnswer":
        """Set a status other than whole, with its detail; returns the answer."""
        message = detail if isinstance(detail, str) else f"{type(detail).__name__}: {detail}"
        self.status, self.detail = status, message[:_DETAIL_CHARS_MAX]
        return self


class _GatewayClient:
    """Base of the clients: sends each call to any of the gateways."""

    timeout: httpx.Timeout

    def __init__(self, urls: Sequence[str], model: str, rng: random.Random, key: str = "") -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=100,
            keepalive_expiry=_KEPT_S,
        )
        self._clients = [
            httpx.AsyncClient(base_url=url, headers=headers, timeout=self.timeout, limits=limits)
            for url in urls
        ]
        self._model = model
        self._rng = rng

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    async def _read(
        self,
        opening: AbstractAsyncContextManager[httpx.Response],
        answer: ClientAnswer,
        read_max: int,
    ) -> None:
        """Read a stream to its end, or until the client disconnects; raises what breaks it."""
        async with opening as response:
            if response.status_code != httpx.codes.OK:
                raise NotReady(f"{response.status_code}: {await response.aread()!r}")
            event_id = ""
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    event_id = line.removeprefix("id: ")
                elif line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise _failure(event["error"])
                    answer.read(event, time.monotonic())
                    answer.event_id = event_id
                if read_max and len(answer.token_ids) >= read_max and not answer.status:
                    answer.status = HUNG_UP
                    return


class Once(_GatewayClient):
    """Asks once for an answer without streaming, and pauses for 1 s after a failure.

    Follows the client of Dynamo's fault tolerance tests (tests/fault_tolerance/client.py there).
    """

    name = "one try"

    timeout = httpx.Timeout(_ONCE_S)

    async def ask(self, question: ChatQuestion) -> ClientAnswer:
        """Return one answer, whole or failed."""
        answer = ClientAnswer(client=self.name)
        body = question.body(self._model, stream=False)
        try:
            client = self._rng.choice(self._clients)
            response = await client.post(_CHAT, json=body)
        except httpx.HTTPError as error:
            answer.fail(NOT_CONNECTED, error)
        else:
            if response.status_code == httpx.codes.OK:
                answer.read_whole(response.json(), time.monotonic())
            else:
                answer.fail(f"{REFUSED} {response.status_code}", response.text)
        if answer.status != WHOLE:
            await asyncio.sleep(_ONCE_PAUSE_S)
        return answer


class Balanced(_GatewayClient):
    """A client behind a load balancer: if a gateway is down or refuses the call, the client tries
    the next one at once. It does not retry an answer that has begun.
    """

    name = "balanced"

    timeout = httpx.Timeout(None, connect=_CONNECT_S)

    async def ask(self, question: ChatQuestion, into: ClientAnswer | None = None) -> ClientAnswer:
        """Return one answer, whole or failed. The caller may read `into` while it grows."""
        answer = into or ClientAnswer(client=self.name)
        body = question.body(self._model, stream=True)
        for client in self._rng.sample(self._clients, len(self._clients)):
            opening, answer.status, answer.detail = client.stream("POST", _CHAT, json=body), "", ""
            try:
                await self._read(opening, answer, question.read_max)
            except (httpx.ConnectError, NotReady) as error:
                answer.fail(NOT_CONNECTED, error)
                if not answer.request_id:
                    continue
            except (httpx.HTTPError, TriviumError) as error:
                answer.fail(BROKEN, error)
            break
        return answer if answer.status else answer.fail(BROKEN, "ended without a finish reason")


class Resuming(_GatewayClient):
    """A client that retries until an answer begins, and resumes broken streams at any gateway."""

    name = "resuming"

    timeout = httpx.Timeout(None, connect=_CONNECT_S)
    patience_s = 300.0  # for a whole answer

    async def ask(self, question: ChatQuestion) -> ClientAnswer:
        """Return one answer, resumed as often as it breaks."""
        answer, why = ClientAnswer(client=self.name), ""
        try:
            async with asyncio.timeout(self.patience_s):
                while not answer.status:
                    try:
                        await self._read(self._opening(question, answer), answer, question.read_max)
                    except (httpx.HTTPError, TriviumError) as error:
                        why = f"{type(error).__name__}: {error}"
                    if not answer.status:
                        answer.breaks += 1
                        await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            return answer.fail(GAVE_UP, why)
        return answer

    def _opening(
        self, question: ChatQuestion, answer: ClientAnswer
    ) -> AbstractAsyncContextManager[httpx.Response]:
        client = self._rng.choice(self._clients)
        if not answer.event_id:
            body = question.body(self._model, stream=True)
            return client.stream("POST", _CHAT, json=body, headers=_WITH_IDS)
        answer.resumes += 1
        url, headers = f"/v1/requests/{answer.request_id}/events", {_RESUME: answer.event_id}
        return client.stream("GET", url, headers=headers)


def _failure(error: dict[str, Any]) -> TriviumError:
    code, message = str(error.get("code")), str(error.get("message"))
    return from_wire(WireError(code=code, message=message))
