"""Sends a trace to a gateway, at the trace's times or at full speed, and records the answers.

Each request is sent when it is due and what it waits for has happened: the session's previous turn
has ended, or the trace's condition holds. A failed request counts as ended, and is not retried.
`prompts.py` makes prompts and bodies, `report.py` the figures.
"""

import asyncio
import json
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from infra.traces.order import SendStep, in_order
from infra.traces.prompts import body
from infra.traces.trace import Arrival, Trace

MakeBody = Callable[[Arrival, str], dict[str, Any]]  # returns the body for this model
IN_FLIGHT_MAX = 1_024  # requests of one client; those due beyond it are late, as the report shows
_AHEAD_MAX = 10_000  # requests that may wait for others at a time
_CONNECT_S = 30.0
_NOT_OPENAI = (ValueError, TypeError, LookupError, AttributeError)  # from other servers' events


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How many times faster than the trace; at infinity, times and delays are ignored."""

    speed: float = 1.0
    in_flight: int = IN_FLIGHT_MAX


@dataclass(slots=True, kw_only=True)
class SentRequest:
    """One request and its answer as the client received it; times in s, of one monotonic clock."""

    arrival: Arrival
    due_s: float = 0.0
    is_scheduled: bool = True  # it waited for its time, not for another request
    sent_s: float = 0.0
    chunks_s: list[float] = field(default_factory=list)  # of chunks with text
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str = ""
    error: str = ""
    dispatched: asyncio.Event = field(default_factory=asyncio.Event)
    completed: asyncio.Event = field(default_factory=asyncio.Event)


class TraceSender:
    """One run over one trace."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        trace: Trace,
        model: str,
        pace: Pace,
        make_body: MakeBody | None = None,
    ) -> None:
        """Prepare a run; `make_body` makes the body of each call, by default from the trace."""
        self._client, self._trace, self._model, self._pace = client, trace, model, pace
        self._make_body = make_body or (lambda arrival, model: body(trace, arrival, model))
        self._slots = asyncio.Semaphore(pace.in_flight)
        self._ahead = asyncio.Semaphore(pace.in_flight + _AHEAD_MAX)
        self._run = uuid.uuid4().hex[:12]  # so that no session of another run continues
        self._begin_s = 0.0
        self.requests: list[SentRequest] = []

    async def run(
        self, on_end: Callable[[SentRequest], None] = lambda request: None
    ) -> list[SentRequest]:
        """Send all requests; raises ConfigError before, where some wait in a circle."""
        steps = in_order(self._trace)
        first_ms = steps[0].at_ms if steps else 0.0
        self._begin_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for step in steps:
                due_s = self._begin_s + (step.at_ms - first_ms) / 1e3 / self._pace.speed
                request = SentRequest(
                    arrival=step.arrival, due_s=due_s, is_scheduled=not step.waits
                )
                self.requests.append(request)
                await self._ahead.acquire()
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                tasks.create_task(self._send(step, request, on_end))
        return self.requests

    async def _send(
        self, step: SendStep, request: SentRequest, on_end: Callable[[SentRequest], None]
    ) -> None:
        for place, wait in step.waits:
            before = self.requests[place]
            await (before.dispatched if wait.trigger == "dispatch" else before.completed).wait()
        delay_ms = max((wait.delay_ms for _, wait in step.waits), default=0.0)
        if delay_ms and math.isfinite(self._pace.speed):
            await asyncio.sleep(delay_ms / 1e3 / self._pace.speed)
        try:
            async with self._slots:
                request.sent_s = time.monotonic()
                request.dispatched.set()
                await self._call(request)
        except (httpx.HTTPError, *_NOT_OPENAI) as error:
            request.error = type(error).__name__
        finally:
            request.completed.set()
            self._ahead.release()
            on_end(request)

    async def _call(self, request: SentRequest) -> None:
        arrival = request.arrival
        name = arrival.session_id or arrival.request_id
        headers = {"X-Session-Id": f"trace-{self._run}-{name}"[:128]}
        if arrival.priority:
            headers["x-priority"] = arrival.priority
        payload = self._make_body(arrival, self._model)
        url = "/v1/completions"
        async with self._client.stream("POST", url, json=payload, headers=headers) as answer:
            if answer.is_error:
                await answer.aread()
                request.error = _code(answer.text) or f"status {answer.status_code}"
                return
            is_done = False
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    is_done = True
                elif line.startswith("data: "):
                    _note_event(request, json.loads(line[6:]))
            if not is_done:
                request.error = request.error or "broken off"


def _note_event(request: SentRequest, event: dict[str, Any]) -> None:
    if error := event.get("error"):
        request.error = str(error.get("code") or error.get("message"))
    if any(choice.get("text") for choice in event.get("choices", ())):
        request.chunks_s.append(time.monotonic())
    for choice in event.get("choices", ()):
        request.finish_reason = choice.get("finish_reason") or request.finish_reason
    if used := event.get("usage"):
        request.prompt_tokens, request.output_tokens = (
            used["prompt_tokens"],
            used["completion_tokens"],
        )


def _code(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["code"] or "")
    except (ValueError, KeyError, TypeError):
        return ""


async def send(
    trace: Trace,
    url: str,
    model: str,
    pace: Pace,
    make_body: MakeBody | None = None,
    *,
    api_key: str,
    on_end: Callable[[SentRequest], None] = lambda request: None,
) -> list[SentRequest]:
    """Send the whole trace to the gateway at that address."""
    limits = httpx.Limits(max_connections=pace.in_flight, max_keepalive_connections=pace.in_flight)
    timeout = httpx.Timeout(None, connect=_CONNECT_S)
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(
        base_url=url, limits=limits, timeout=timeout, headers=headers
    ) as client:
        return await TraceSender(client, trace, model, pace, make_body).run(on_end)
