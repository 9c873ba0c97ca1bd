"""Sends chat requests to a gateway as any OpenAI client would, and keeps the answers."""

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from schemas.errors import EngineFailed

OnToken = Callable[[int], Awaitable[None]]
OnText = Callable[[str], Awaitable[None]]


@dataclass(slots=True)
class DemoTurn:
    """One question and its answer."""

    question: str
    answer: str = ""
    reasoning: str = ""
    first_token_ms: float = 0.0
    events: int = 0  # events with text
    is_finished: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        """Return the id under which its records are on the log."""
        return str(self.metadata.get("request_id", ""))

    @property
    def citations(self) -> Sequence[dict[str, Any]]:
        """Return the passages that were inserted into its prompt."""
        passages: Sequence[dict[str, Any]] = self.metadata.get("retrieval", {}).get("citations", ())
        return passages


async def ask(
    client: httpx.AsyncClient,
    model: str,
    messages: Sequence[dict[str, str]],
    max_tokens: int,
    session: str,
    *,
    retrieval: Mapping[str, Any] | None = None,
    on_token: OnToken | None = None,
    on_text: OnText | None = None,
) -> DemoTurn:
    """Stream one greedy answer.

    `on_token` gets the number of events with text so far, `on_text` the text. Raises EngineFailed
    if the gateway answers with an error.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if retrieval is not None:
        body["retrieval"] = retrieval
    turn, began_s = DemoTurn(messages[-1]["content"]), time.monotonic()
    url, headers = "/v1/chat/completions", {"X-Session-Id": session}
    async with client.stream("POST", url, json=body, headers=headers) as response:
        async for line in response.aiter_lines():
            if line.startswith("{"):  # an error instead of a stream
                _check(json.loads(line))
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            _check(event)
            turn.metadata = event.get("trivium") or turn.metadata
            turn.usage = event.get("usage") or turn.usage
            for choice in event.get("choices", []):
                content = choice["delta"].get("content") or ""
                if text := (choice["delta"].get("reasoning") or "") + content:
                    turn.first_token_ms = turn.first_token_ms or (time.monotonic() - began_s) * 1000
                    turn.answer += content
                    turn.reasoning += text.removesuffix(content)
                    turn.events += 1
                    if on_token is not None:
                        await on_token(turn.events)
                    if on_text is not None:
                        await on_text(text)
                turn.is_finished = turn.is_finished or bool(choice.get("finish_reason"))
    return turn


def _check(event: dict[str, Any]) -> None:
    if "error" in event:
        raise EngineFailed(f"the gateway answered: {event['error']['message']}")
