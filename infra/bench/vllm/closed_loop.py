"""Runs one cell of `bench vllm`: streams that converse with a server in a closed loop.

Every conversation's opening is new, so caches have only what its own turns share. Figures are taken
from the end of the first answer on, when the batch is full. Requests in flight at the end are
cancelled. The load is the same for every server under test.
"""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from infra.bench.results import percentiles

TOKENS = 32  # of every answer
LATER_TOKENS = 60  # of a question after the first
FIRST_ANSWER_S = 120.0  # longest wait for the first answer
_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCell:
    """The load of one cell."""

    streams: int
    prompt_tokens: int  # of a conversation's opening; the chat template adds some
    turns: int
    window_s: float = 8.0

    @property
    def name(self) -> str:
        """Return the name for tables and files."""
        turns = "1 turn" if self.turns == 1 else f"{self.turns} turns"
        return f"{self.streams} streams, {self.prompt_tokens} tokens, {turns}"


@dataclass(slots=True)
class ChatTurn:
    """One answer. Times are monotonic."""

    prompt: str  # the conversation so far; equal ones must get equal answers
    began_s: float = field(default_factory=time.monotonic)
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # time, number of tokens
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    error: str = ""
    is_whole: bool = False


class ConversationStreams:
    """Sends the load of one cell and records its turns."""

    def __init__(
        self, url: str, model: str, cell: LoadCell, words: Sequence[str], seed: str
    ) -> None:
        self._url = url + _PATH
        self._model = model
        self._cell = cell
        self._words = words
        self._seed = seed
        self._turns: list[ChatTurn] = []
        self._first_end = asyncio.Event()

    async def measure(self) -> dict[str, Any]:
        """Run the load of the cell and return its figures."""
        options: dict[str, Any] = {"connector": aiohttp.TCPConnector(limit=0)}
        async with aiohttp.ClientSession(**options, timeout=aiohttp.ClientTimeout()) as client:
            streams = [
                asyncio.create_task(self._stream(client, number))
                for number in range(self._cell.streams)
            ]
            try:
                async with asyncio.timeout(FIRST_ANSWER_S):
                    await self._first_end.wait()
            except TimeoutError:
                pass
            begin_s = time.monotonic()
            await asyncio.sleep(self._cell.window_s)
            end_s = time.monotonic()
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        return self._figures(begin_s, end_s)

    async def _stream(self, client: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(f"{self._seed} {self._cell.name} {number}")
        while True:
            messages = [{"role": "user", "content": self._text(rng, self._cell.prompt_tokens)}]
            for _ in range(self._cell.turns):
                turn = await self._ask(client, messages)
                if turn.error:
                    await asyncio.sleep(0.5)
                    break
                messages.append({"role": "assistant", "content": turn.text})
                messages.append({"role": "user", "content": self._text(rng, LATER_TOKENS)})

    def _text(self, rng: random.Random, tokens: int) -> str:
        return " ".join(rng.choices(self._words, k=tokens))

    async def _ask(self, client: aiohttp.ClientSession, messages: list[dict[str, str]]) -> ChatTurn:
        turn = ChatTurn(json.dumps(messages))
        self._turns.append(turn)
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        try:
            async with client.post(self._url, json=body) as response:
                if response.status != 200:
                    turn.error = f"status {response.status}"
                    return turn
                async for line in response.content:
                    _fold(line, turn)
        except aiohttp.ClientError as error:
            turn.error = type(error).__name__
        turn.is_whole = len(turn.token_ids) == TOKENS
        turn.error = turn.error or ("" if turn.is_whole else f"{len(turn.token_ids)} tokens")
        self._first_end.set()
        return turn

    def _figures(self, begin_s: float, end_s: float) -> dict[str, Any]:
        tokens = sum(
            count
            for turn in self._turns
            for when_s, count in turn.arrivals
            if begin_s <= when_s < end_s
        )
        started_turns = [turn for turn in self._turns if turn.arrivals]
        first = [1e3 * (turn.arrivals[0][0] - turn.began_s) for turn in started_turns]
        steps = [
            1e3 * (turn.arrivals[-1][0] - turn.arrivals[0][0]) / (TOKENS - 1)
            for turn in started_turns
            if turn.is_whole
        ]
        errors = [turn.error for turn in self._turns if turn.error]
        return {
            "requests_per_s": tokens / TOKENS / (end_s - begin_s),
            "answers": sum(turn.is_whole for turn in self._turns),
            "ttft_ms": percentiles(first),
            "tpot_ms": percentiles(steps),
            "errors": {error: errors.count(error) for error in set(errors)},
            "said": {turn.prompt: tuple(turn.token_ids) for turn in self._turns if turn.is_whole},
        }


def _fold(line: bytes, turn: ChatTurn) -> None:
    """Add one line of server-sent events to the turn."""
    if not line.startswith(b"data: {"):
        return
    event = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        turn.error = str(event["error"].get("message"))[:100]
    for choice in event.get("choices", ()):
        turn.text += choice["delta"].get("content") or ""
        if token_ids := choice.get("token_ids"):
            turn.token_ids += token_ids
            turn.arrivals.append((time.monotonic(), len(token_ids)))
