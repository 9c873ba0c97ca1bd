"""Clients of the benchmarks that kill processes: what they ask, and what they see of the answers.

`Plain` is the `openai` package as it comes: it tries again until an answer has begun, and knows
nothing of resuming. `Once` asks for a whole answer and never again. `Resuming` reads a stream by
hand, and where it breaks goes on with `Last-Event-ID` at any gateway. None judges what it reads.
"""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import openai

from schemas.errors import NotReady, TriviumError, from_wire
from schemas.records import WireError

WHOLE, BROKEN, ERROR = "whole", "broken off", "error event"
REFUSED, NOT_CONNECTED, GAVE_UP = "refused", "not connected", "gave up"
_RESUME = "Last-Event-ID"
_PUBLIC_PREFIX = "chatcmpl-"
_PAUSE_S = 0.5  # before a client that resumes tries again
_CONNECT_S = 10.0
_ONCE_S, _ONCE_PAUSE_S = 30.0, 1.0
_DETAIL_CHARS_MAX = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a client asks."""

    messages: Sequence[dict[str, str]]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class Seen:
    """What a client saw of one question."""

    client: str  # plain or resuming
    ended: str = ""  # one of the words above
    detail: str = ""  # of anything but a whole answer
    request_id: str = ""  # of the last request that was made for it and answered
    text: str = ""
    event_id: str = ""  # of the last event that came whole
    breaks: int = 0  # tries that did not lead to the end
    resumes: int = 0
    asked_s: float = field(default_factory=time.monotonic)
    first_s: float = 0.0  # when the first text came
    ended_s: float = 0.0
    pause_s: float = 0.0  # longest between two texts

    def read(self, event: dict[str, Any], now_s: float) -> None:
        """One event."""
        self.request_id = str(event.get("id", "")).removeprefix(_PUBLIC_PREFIX) or self.request_id
        for choice in event.get("choices", ()):
            if text := choice["delta"].get("content"):
                if self.first_s:
                    self.pause_s = max(self.pause_s, now_s - self.ended_s)
                self.first_s = self.first_s or now_s
                self.ended_s = now_s
                self.text += text
            if choice.get("finish_reason"):
                self.ended = WHOLE

    def read_whole(self, answer: dict[str, Any], now_s: float) -> None:
        """An answer that was not streamed."""
        self.request_id = str(answer["id"]).removeprefix(_PUBLIC_PREFIX)
        self.text = answer["choices"][0]["message"]["content"]
        self.ended, self.first_s, self.ended_s = WHOLE, now_s, now_s

    def end(self, ended: str, detail: object) -> "Seen":
        """Not whole."""
        said = detail if isinstance(detail, str) else f"{type(detail).__name__}: {detail}"
        self.ended, self.detail = ended, said[:_DETAIL_CHARS_MAX]
        return self


class Plain:
    """The `openai` client with its defaults: two further tries before an answer begins."""

    name = "plain"

    def __init__(self, urls: Sequence[str], model: str, rng: random.Random) -> None:
        self._clients = [openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") for url in urls]
        self._model = model
        self._rng = rng

    async def ask(self, question: Question) -> Seen:
        """One answer as far as it came."""
        seen = Seen(client=self.name)
        try:
            stream: Any = await self._rng.choice(self._clients).chat.completions.create(
                model=self._model,
                messages=list(question.messages),  # type: ignore[arg-type]  # plain dictionaries
                max_tokens=question.max_tokens,
                temperature=question.temperature,
                seed=question.seed,
                stream=True,
            )
            async for chunk in stream:
                seen.read(chunk.model_dump(), time.monotonic())
        except openai.APIStatusError as error:
            return seen.end(f"{REFUSED} {error.status_code}", error)
        except openai.APIConnectionError as error:
            return seen.end(BROKEN if seen.text else NOT_CONNECTED, error)
        except openai.APIError as error:
            return seen.end(ERROR, error)
        except (httpx.HTTPError, ValueError) as error:
            return seen.end(BROKEN, error)
        return seen if seen.ended else seen.end(BROKEN, "ended without a finish reason")

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            await client.close()


class _ByHand:
    """A client that makes its own requests, each at any gateway."""

    timeout: httpx.Timeout

    def __init__(self, urls: Sequence[str], model: str, rng: random.Random) -> None:
        self._clients = [httpx.AsyncClient(base_url=url, timeout=self.timeout) for url in urls]
        self._model = model
        self._rng = rng

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            await client.aclose()


class Once(_ByHand):
    """One try for a whole answer, not streamed, and a second's pause after a failed one.

    The client of Dynamo's fault tolerance tests (tests/fault_tolerance/client.py there).
    """

    name = "one try"

    timeout = httpx.Timeout(_ONCE_S)

    async def ask(self, question: Question) -> Seen:
        """One answer, or none."""
        seen = Seen(client=self.name)
        body = {"model": self._model, **asdict(question)}
        try:
            client = self._rng.choice(self._clients)
            response = await client.post("/v1/chat/completions", json=body)
        except httpx.HTTPError as error:
            seen.end(NOT_CONNECTED, error)
        else:
            if response.status_code == httpx.codes.OK:
                seen.read_whole(response.json(), time.monotonic())
            else:
                seen.end(f"{REFUSED} {response.status_code}", response.text)
        if seen.ended != WHOLE:
            await asyncio.sleep(_ONCE_PAUSE_S)
        return seen


class Resuming(_ByHand):
    """A client that asks again until an answer begins, and resumes what breaks at any gateway."""

    name = "resuming"

    timeout = httpx.Timeout(None, connect=_CONNECT_S)
    patience_s = 300.0  # for a whole answer

    async def ask(self, question: Question) -> Seen:
        """One answer, however often it breaks."""
        seen, why = Seen(client=self.name), ""
        try:
            async with asyncio.timeout(self.patience_s):
                while not seen.ended:
                    try:
                        await self._read(question, seen)
                    except (httpx.HTTPError, TriviumError) as error:
                        why = f"{type(error).__name__}: {error}"
                    if not seen.ended:
                        seen.breaks += 1
                        await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            return seen.end(GAVE_UP, why)
        return seen

    async def _read(self, question: Question, seen: Seen) -> None:
        client = self._rng.choice(self._clients)
        if seen.event_id:
            seen.resumes += 1
            url, headers = f"/v1/requests/{seen.request_id}/events", {_RESUME: seen.event_id}
            opened = client.stream("GET", url, headers=headers)
        else:
            opened = client.stream("POST", "/v1/chat/completions", json=self._body(question))
        async with opened as response:
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
                    seen.read(event, time.monotonic())
                    seen.event_id = event_id

    def _body(self, question: Question) -> dict[str, Any]:
        return {"model": self._model, "stream": True, **asdict(question)}


def _failure(error: dict[str, Any]) -> TriviumError:
    code, message = str(error.get("code")), str(error.get("message"))
    return from_wire(WireError(code=code, message=message))
