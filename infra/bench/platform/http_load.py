"""Sends the same questions over HTTP, and chats that measure the time to the first token.

`HttpLoad` has a fixed number of clients, and each retries until it has an answer; senders of
prompts on a topic need not retry. `TtftProbes` sends chats at a rate, without waiting for earlier
ones.
"""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import aiohttp

from infra.bench.platform.questions import LoadQuestion, draw_questions
from schemas.errors import NotReady

_PATH, _PUBLIC_PREFIX = "/v1/chat/completions", "chatcmpl-"
_PAUSE_S, _PAUSE_MAX_S, _PATIENCE_S = 0.5, 2.0, 600.0  # pauses double, as in the client `openai`
_TRY = aiohttp.ClientTimeout(total=120, connect=5)
_PROBE_TOKENS = 4
_PROBE_PAUSE_S, _PROBE_PATIENCE_S = 0.25, 60.0
_PRIORITY = {"x-priority": "batch"}  # the class of prompts


class HttpLoad:
    """Sends one set of questions over HTTP from a number of clients."""

    def __init__(self, urls: Sequence[str], model: str, clients: int, notes: Path) -> None:
        self._urls, self._model, self._clients, self._notes = urls, model, clients, notes
        self.answered = 0
        self.tries: Counter[str] = Counter()  # failed tries, by reason
        self.began_s = self.ended_s = 0.0

    async def run(
        self, questions: Iterable[LoadQuestion], on_progress: Callable[[int], None]
    ) -> None:
        """Send all questions and wait until each has its answer; raises NotReady."""
        pending_questions = iter(questions)
        self.began_s = time.monotonic()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=_TRY, connector=connector) as session:
            with self._notes.open("a") as notes:

                async def client(number: int) -> None:
                    for question in pending_questions:
                        note = await self._answer(session, question, number)
                        notes.write(json.dumps(note) + "\n")
                        self.answered += 1
                        on_progress(self.answered)

                async with asyncio.TaskGroup() as group:
                    for number in range(self._clients):
                        group.create_task(client(number))
        self.ended_s = time.monotonic()

    async def _answer(
        self, session: aiohttp.ClientSession, question: LoadQuestion, at: int
    ) -> dict[str, object]:
        body, end_s = question.body(self._model), time.monotonic() + _PATIENCE_S
        pause_s = _PAUSE_S
        while True:
            url = self._urls[at % len(self._urls)]
            try:
                async with session.post(url + _PATH, json=body, headers=_PRIORITY) as response:
                    if response.status == 200:
                        return _note(question, await response.json())
                    why = f"status {response.status}"
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                why = type(error).__name__
            self.tries[why] += 1
            if time.monotonic() > end_s:
                raise NotReady(f"question {question.number}: no answer in {_PATIENCE_S} s: {why}")
            at += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)


def _note(question: LoadQuestion, answer: dict[str, object]) -> dict[str, object]:
    usage = answer["usage"]
    assert isinstance(usage, dict)
    return {
        "number": question.number,
        "request_id": str(answer["id"]).removeprefix(_PUBLIC_PREFIX),
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
    }


class TtftProbes:
    """Sends interactive chats at a rate, and measures ms from each call to its first token."""

    def __init__(self, urls: Sequence[str], model: str, rate: float, seed: int) -> None:
        self._urls, self._model, self._rate = urls, model, rate
        self._seed = seed
        self._number = 0
        self.ttft_ms: list[float] = []
        self.failed = 0

    async def run(self) -> None:
        """Send chats until cancelled. Chats that are unfinished then do not count."""
        rng = random.Random(f"probes {self._seed}")
        due_s, arrivals = time.monotonic(), draw_questions(1 << 30, self._seed + 77)
        async with (
            aiohttp.ClientSession(timeout=_TRY) as session,
            asyncio.TaskGroup() as group,
        ):
            for question in arrivals:
                due_s += rng.expovariate(self._rate)
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                self._number += 1
                group.create_task(self._chat(session, question, self._number))

    async def _chat(self, session: aiohttp.ClientSession, question: LoadQuestion, at: int) -> None:
        """Try the gateways in turn until one streams a token; the time includes failed tries."""
        content = {"messages": [{"role": "user", "content": question.text}]}
        body = {"model": self._model, **content, "max_tokens": _PROBE_TOKENS, "stream": True}
        began_s = time.monotonic()
        while (passed_s := time.monotonic() - began_s) < _PROBE_PATIENCE_S:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                url = self._urls[at % len(self._urls)]
                async with session.post(url + _PATH, json=body) as response:
                    async for line in response.content:
                        if b'"content":' in line and b'"content": ""' not in line:
                            self.ttft_ms.append(1e3 * (time.monotonic() - began_s))
                            return
            at += 1
            await asyncio.sleep(min(_PROBE_PAUSE_S, passed_s))  # the first retry is immediate
        self.failed += 1
