"""Conversations with a live stack: prompts follow from their names, answers are streamed.

The client side of `comparison.py` and `live_table.py`; judges nothing.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import httpx

from infra.stack.launcher import Stack

_WORDS = "a log remembers what its readers have not asked for yet and tells it again".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLoad:
    """The conversations of a load; at most `streams` run at a time."""

    name: str = ""
    conversations: int = 20
    turns: int = 4
    streams: int = 2
    per_s: float = 0.0  # conversations/s as a Poisson process; 0: as soon as a stream is free
    tokens: int = 24  # of each answer
    words: int = 60  # of each prompt's new message
    first_tokens: int = 0  # of the first answer; 0: as of the others
    first_words: int = 0  # of the first message; 0: as of the others
    seed: int = 1

    def begins_s(self) -> list[float]:
        """Return the earliest begin of each conversation, in s."""
        if not self.per_s:
            return [0.0] * self.conversations
        rng = random.Random(self.seed)
        return list(accumulate(rng.expovariate(self.per_s) for _ in range(self.conversations)))


@dataclass(slots=True, kw_only=True)
class LiveTurn:
    """One answer, as its client saw it."""

    number: int  # from 1
    request_id: str = ""
    prompt_tokens: int = 0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    mode: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)


async def converse(
    client: httpx.AsyncClient,
    model: str,
    load: LiveLoad,
    name: str,
    session: str,
    weights: str = "",
) -> list[LiveTurn]:
    """Run one conversation and return its turns; its prompts follow from the seed and its name."""
    rng = random.Random(f"{load.seed} {name}")
    messages: list[dict[str, str]] = []
    turns = []
    for number in range(1, load.turns + 1):
        words = (number == 1 and load.first_words) or load.words
        question = f"{name}: {' '.join(rng.choices(_WORDS, k=words))}?"
        messages.append({"role": "user", "content": question})
        body = {
            "model": model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": (number == 1 and load.first_tokens) or load.tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        turn = await _ask(client, body, session, number, weights)
        messages.append({"role": "assistant", "content": turn.text})
        turns.append(turn)
    return turns


async def _ask(
    client: httpx.AsyncClient, body: dict[str, Any], session: str, number: int, weights: str
) -> LiveTurn:
    turn, times = LiveTurn(number=number), list[float]()
    began_s = time.perf_counter()
    headers = {"X-Session-Id": session}
    if weights:
        headers["x-trivium-weights"] = weights
    url = "/v1/chat/completions"
    async with client.stream("POST", url, json=body, headers=headers) as response:
        response.raise_for_status()
        turn.request_id = response.headers["x-trivium-request-id"]
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(f"{session}, turn {number}: {event['error']}")
            for choice in event.get("choices", ()):
                turn.text += choice["delta"].get("content") or ""
                token_ids = choice.get("token_ids") or []
                turn.token_ids += token_ids
                times += [time.perf_counter()] * len(token_ids)
            used = event.get("usage") or {}
            turn.prompt_tokens = used.get("prompt_tokens", turn.prompt_tokens)
            placed = event.get("trivium") or {}
            turn.mode = placed.get("mode", turn.mode)
    turn.ttft_ms = (times[0] - began_s) * 1_000
    turn.tpot_ms = (times[-1] - times[0]) * 1_000 / max(1, len(times) - 1)
    return turn


async def hold(stack: Stack, load: LiveLoad, prefix: str, session: str) -> list[list[LiveTurn]]:
    """Run all conversations of the load on one stack, with names that begin with `prefix`."""
    return await hold_at(
        stack.gateway_urls[0], stack.settings.model.served_name, load, prefix, session
    )


async def hold_at(
    url: str, model: str, load: LiveLoad, prefix: str, session: str, weights: str = ""
) -> list[list[LiveTurn]]:
    """Run the conversations at a gateway's address, with weights in each request's header."""
    free_streams = asyncio.Semaphore(load.streams)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def chat_once(number: int, begins_s: float) -> list[LiveTurn]:
            await asyncio.sleep(begins_s)
            async with free_streams:
                name = f"{prefix} {number}"
                return await converse(client, model, load, name, f"{session} {name}", weights)

        return await asyncio.gather(*map(chat_once, range(load.conversations), load.begins_s()))
