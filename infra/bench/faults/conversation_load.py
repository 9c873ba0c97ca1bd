"""Conversations of many clients, drawn from a seed, for as long as a run lasts.

Each client talks in turns that build on each other and begins anew where an answer broke. What
they saw is collected, and judged against what one engine alone says.
"""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from infra.bench.faults.http_clients import WHOLE, Question, Seen
from infra.stack.engine_alone import LoneAnswer
from workers.models.sim import make_tokenizer

OPENINGS, OPENING_WORDS = 48, (8, 96)
FOLLOW_UPS = ("And then?", "Why is that so?", "Say it again in other words.")
ANSWER_TOKENS = (8, 32, 96, 200)  # at 20 ms each


class Client(Protocol):
    """Either of `http_clients.py`."""

    async def ask(self, question: Question) -> Seen:
        """One answer as far as it came."""

    async def close(self) -> None:
        """Close all connections."""


class Talks:
    """What so many clients ask and see."""

    def __init__(self, clients: Sequence[Client], seed: int) -> None:
        self._clients = clients
        self._seed = seed
        self._openings = _openings(seed)
        self.seen: list[Seen] = []
        self.under_way = 0
        self.is_over = False

    async def run(self) -> None:
        """Talk until `is_over`; returns when the last answers have ended."""
        talks = [self._talk(client, number) for number, client in enumerate(self._clients)]
        await asyncio.gather(*talks)
        for client in self._clients:
            await client.close()

    async def _talk(self, client: Client, number: int) -> None:
        rng = random.Random(self._seed * 1_000 + number)
        while not self.is_over:
            opening = rng.randrange(OPENINGS)
            messages = [{"role": "user", "content": self._openings[opening]}]
            for follow_up in (*FOLLOW_UPS[: rng.randrange(len(FOLLOW_UPS) + 1)], ""):
                seen = await self._ask(client, _question(messages, opening))
                if seen.ended != WHOLE or self.is_over:
                    break
                messages.append({"role": "assistant", "content": seen.text})
                messages.append({"role": "user", "content": follow_up})

    async def _ask(self, client: Client, question: Question) -> Seen:
        self.under_way += 1
        try:
            seen = await client.ask(question)
        finally:
            self.under_way -= 1
        self.seen.append(seen)
        return seen

    def counts(self) -> dict[str, Counter[str]]:
        """How questions ended, by client."""
        endings: dict[str, Counter[str]] = {}
        for seen in self.seen:
            endings.setdefault(seen.client, Counter())[seen.ended] += 1
        return endings


def wrong(seen: Sequence[Seen], expected: Mapping[str, LoneAnswer]) -> list[str]:
    """Answers, or beginnings of answers, that are not what the engine alone says."""
    sentences = []
    for each in seen:
        if not each.request_id:
            continue
        if (answer := expected.get(each.request_id)) is None:
            sentences.append(f"{each.request_id}: answered, but not on the log")
            continue
        is_right = answer.text == each.text
        if each.ended != WHOLE:
            is_right = answer.text.startswith(each.text)
        if not is_right:
            place = _same(answer.text, each.text)
            sentences.append(
                f"{each.request_id}: {each.client} saw {each.text[place : place + 30]!r} after "
                f"{place} characters, expected {answer.text[place : place + 30]!r}"
            )
    return sentences


def _same(left: str, right: str) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return sum(1 for _ in pairs)


def _question(messages: Sequence[dict[str, str]], opening: int) -> Question:
    """Every third conversation is sampled, the others are greedy."""
    turn = len(messages) // 2
    return Question(
        messages=list(messages),
        max_tokens=ANSWER_TOKENS[(opening + turn) % len(ANSWER_TOKENS)],
        temperature=0.0 if opening % 3 else 0.8,
        seed=opening,
    )


def _openings(seed: int) -> list[str]:
    rng = random.Random(seed)
    vocabulary = make_tokenizer().get_vocab()
    words = sorted(token[1:] for token in vocabulary if token.startswith("Ġ") and len(token) > 3)
    return [" ".join(rng.choices(words, k=rng.randint(*OPENING_WORDS))) for _ in range(OPENINGS)]
