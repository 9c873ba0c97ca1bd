"""Streams greedy answers of a fixed length from a gateway, for the fault benchmarks on vLLM."""

import json
import time
from typing import Any

import aiohttp

from infra.bench.faults.http_clients import ClientAnswer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NAME = "streams"


class StreamClient:
    """Calls one gateway, each call on a new connection. `hang_up` closes all of them."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        options: dict[str, Any] = {"connector": aiohttp.TCPConnector(limit=0, force_close=True)}
        self._client = aiohttp.ClientSession(**options, timeout=aiohttp.ClientTimeout())

    async def hang_up(self) -> None:
        """Close all connections, also during answers."""
        await self._client.close()

    async def stream(
        self, text: str, tokens: int, into: ClientAnswer | None = None
    ) -> ClientAnswer:
        """Return an answer of `tokens` tokens. The caller may read `into` while it grows."""
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
        """Return the gap in nats between the two highest log-probabilities of the next token."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        async with self._client.post(
            self._url + COMPLETIONS, json={**body, "logprobs": 2, "ignore_eos": True}
        ) as response:
            answer = await response.json()
        first, second = sorted(
            answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True
        )[:2]
        return float(first - second)
