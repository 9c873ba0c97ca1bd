"""Sends conversations at a rate, drawn from a seed, without waiting for earlier answers.

Each call continues a conversation whose last answer is whole, or begins one. Some conversations
retrieve passages, and in some calls the client disconnects midway. Passes each answer to
`on_answer`.
"""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from infra.bench.faults.http_clients import WHOLE, ChatQuestion, ClientAnswer
from infra.handbook.library import TextDocument
from workers.models.sim import make_tokenizer

COLLECTION = "chaos"
OPENINGS, OPENING_WORDS = 48, (8, 96)
FOLLOW_UPS = ("And then?", "Why is that so?", "Say it again in other words.")
ANSWER_TOKENS = (8, 24, 48, 96)
RETRIEVES, HANGS_UP, GOES_ON = 0.3, 0.05, 0.7  # shares
UNDER_WAY_MAX = 1_500  # with more calls in flight, questions are skipped and counted


class Client(Protocol):
    """Asks one question at a time, as each client of `http_clients.py` does."""

    async def ask(self, question: ChatQuestion) -> ClientAnswer:
        """Return one answer as far as it was received."""

    async def close(self) -> None:
        """Close all connections of the client."""


@dataclass(slots=True)
class Talk:
    """One conversation, and how it continues."""

    opening: int
    messages: list[dict[str, str]]
    looks_up: bool
    turns_left: int


class ConversationLoad:
    """Sends all conversations through one client at a rate."""

    def __init__(
        self,
        client: Client,
        *,
        rate: float,
        seed: int,
        on_answer: Callable[[ClientAnswer], None],
        retrieves: float = RETRIEVES,
    ) -> None:
        self._client, self._rate, self._on_answer = client, rate, on_answer
        self._retrieves = retrieves
        self._rng = random.Random(f"load {seed}")
        self._openings = openings(seed)
        self._waiting: deque[Talk] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self.status_counts: Counter[str] = Counter()
        self.left_out = 0
        self.is_over = False

    @property
    def under_way(self) -> int:
        """Number of calls in flight."""
        return len(self._tasks)

    async def run(self) -> None:
        """Send questions at the rate until `is_over` is set."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while not self.is_over:
            due_s += self._rng.expovariate(self._rate)
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            if self.under_way >= UNDER_WAY_MAX:
                self.left_out += 1
                continue
            task = asyncio.create_task(self._ask(self._next()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def drain(self, seconds: float) -> int:
        """Wait for calls in flight; cancel those left after `seconds`, and return their number."""
        unfinished_tasks: set[asyncio.Task[None]] = set()
        if self._tasks:
            _, unfinished_tasks = await asyncio.wait(self._tasks, timeout=seconds)
        for task in unfinished_tasks:
            task.cancel()
        await asyncio.gather(*unfinished_tasks, return_exceptions=True)
        await self._client.close()
        return len(unfinished_tasks)

    def _next(self) -> Talk:
        rng = self._rng
        if self._waiting and rng.random() < GOES_ON:
            return self._waiting.popleft()
        opening, looks_up = rng.randrange(OPENINGS), rng.random() < self._retrieves
        first = {"role": "user", "content": self._openings[opening]}
        return Talk(opening, [first], looks_up, rng.randrange(len(FOLLOW_UPS) + 1))

    async def _ask(self, talk: Talk) -> None:
        question = self._question(talk)
        answer = await self._client.ask(question)
        self.status_counts[answer.status] += 1
        self._on_answer(answer)
        if answer.status != WHOLE or not talk.turns_left:
            return
        talk.turns_left -= 1
        talk.messages.append({"role": "assistant", "content": answer.text})
        talk.messages.append({"role": "user", "content": FOLLOW_UPS[talk.turns_left]})
        self._waiting.append(talk)

    def _question(self, talk: Talk) -> ChatQuestion:
        """Return the next question. Every third opening is sampled, the others are greedy."""
        turn = len(talk.messages) // 2
        tokens = ANSWER_TOKENS[(talk.opening + turn) % len(ANSWER_TOKENS)]
        hangs_up = self._rng.random() < HANGS_UP
        query = self._openings[talk.opening]
        return ChatQuestion(
            messages=list(talk.messages),
            max_tokens=tokens,
            temperature=0.0 if talk.opening % 3 else 0.8,
            seed=talk.opening,
            retrieval={"collection": COLLECTION, "query": query} if talk.looks_up else None,
            read_max=self._rng.randint(1, tokens - 1) if hangs_up else 0,
        )


def openings(seed: int) -> list[str]:
    """Return the opening questions of all conversations, drawn from the seed."""
    rng = random.Random(seed)
    vocabulary = make_tokenizer().get_vocab()
    words = sorted(token[1:] for token in vocabulary if token.startswith("Ġ") and len(token) > 3)
    return [" ".join(rng.choices(words, k=rng.randint(*OPENING_WORDS))) for _ in range(OPENINGS)]


def texts(seed: int) -> Sequence[TextDocument]:
    """Return one document for each opening, with the same text."""
    return [TextDocument(f"d{number}", text) for number, text in enumerate(openings(seed))]
