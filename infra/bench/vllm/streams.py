"""Greedy streamed answers of a gateway, of a length that is known: what clients of faults ask."""

import json
import time
from typing import Any

import aiohttp

from infra.bench.faults.http_clients import ClientAnswer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NAME = "streams"


class StreamClient:
    """Calls of one gateway, each on a connection of its own. `hang_up` closes all of them."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        options: dict[str, Any] = {"connector": aiohttp.TCPConnector(limit=0, force_close=True)}
        self._client = aiohttp.ClientSession(**options, timeout=aiohttp.ClientTimeout())

    async def hang_up(self) -> None:
        """Close every connection, whatever comes on it."""
        await self._client.close()

    async def stream(
        self, text: str, tokens: int, into: ClientAnswer | None = None
    ) -> ClientAnswer:
        """One answer of so many tokens; `into` can be looked at while it grows."""
        answer = into or ClientAnswer(client=NAME)
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with self._client.post(self._url + CHAT, json=body) as response:
            if response.status != 200:
                return answer.fail(f"status {response.status}", await response.text())
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        answer.detail = str(event["error"].get("message"))
                    answer.read(event, time.monotonic())
        return answer

    async def next_token_gap(self, prompt: list[int]) -> float:
        """By how much the log-probability of the likeliest next token is above the second's."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        async with self._client.post(
            self._url + COMPLETIONS, json={**body, "logprobs": 2, "ignore_eos": True}
        ) as response:
            answer = await response.json()
        first, second = sorted(
            answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True
        )[:2]
        return float(first - second)
