"""Counts lost and silent answers when a shard replica is killed, and then a whole shard.

The documents have two shards, one with two replicas; engines are simulated. Chats arrive at a rate.
Each searches for one page by the page's words, so its answer must cite that page. An answer is lost
if the call fails. It is silent if it lacks its page and does not report that a shard was missing or
that the search failed.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.progress import Progress
from rich.table import Table

from infra.bench.results import Bar, at_least, at_most
from infra.handbook.handbook import Page, handbook
from infra.handbook.library import Library, TextDocument
from infra.stack.launcher import Stack

COLLECTION, SHARDS = "handbook", 2
REPLICA, SHARD = "retrieval-2", "retrieval-1"  # one of two of shard 0, and all of shard 1
WHOLE, ONE_REPLICA, NO_SHARD = "whole", "one replica killed", "one shard killed"
_PAGES, _FOUND_S, _PATIENCE_S = 40, 120.0, 60.0


@dataclass(frozen=True, slots=True)
class ChatOutcome:
    """The outcome of one chat."""

    phase: str
    is_lost: bool
    is_cited: bool  # whether it cites its page
    says_so: bool  # whether it reports a missing shard or a failed search

    @property
    def is_silent(self) -> bool:
        return not (self.is_lost or self.is_cited or self.says_so)


async def measure(
    stack: Stack, books: Library, rate: float, phase_s: float, seed: int, progress: Progress
) -> Mapping[str, Any]:
    """Return counts by phase: nothing is killed, a shard replica, and then a shard."""
    pages = handbook(_PAGES)
    texts = [TextDocument(page.document_id, page.text, page.title) for page in pages]
    await books.put(COLLECTION, texts)
    for text in texts:
        await books.wait_for(COLLECTION, text, _FOUND_S)
    chats = Chats(stack, pages, seed)
    victims = {WHOLE: "", ONE_REPLICA: REPLICA, NO_SHARD: SHARD}
    task = progress.add_task("kills", total=len(victims))
    for phase, victim in victims.items():
        if victim:
            await stack.kill(victim)
        await chats.ask(phase, rate, phase_s)
        progress.advance(task)
    return figures(await chats.answers())


class Chats:
    """Sends chats at a rate, without waiting for earlier ones."""

    def __init__(self, stack: Stack, pages: Sequence[Page], seed: int) -> None:
        self._model = stack.settings.model.served_name
        self._pages, self._rng = pages, random.Random(f"losses {seed}")
        self._client = httpx.AsyncClient(base_url=stack.gateway_urls[0], timeout=_PATIENCE_S)
        self._tasks: list[asyncio.Task[ChatOutcome]] = []

    async def ask(self, phase: str, rate: float, phase_s: float) -> None:
        """Send chats at this rate for `phase_s` seconds."""
        began_s = time.monotonic()
        for number in range(round(rate * phase_s)):
            await asyncio.sleep(max(0.0, began_s + number / rate - time.monotonic()))
            page = self._rng.choice(self._pages)
            self._tasks.append(asyncio.create_task(self._chat(phase, page)))
        await asyncio.sleep(max(0.0, began_s + phase_s - time.monotonic()))

    async def answers(self) -> list[ChatOutcome]:
        """Wait for all chats and return their outcomes."""
        try:
            return await asyncio.gather(*self._tasks)
        finally:
            await self._client.aclose()

    async def _chat(self, phase: str, page: Page) -> ChatOutcome:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": page.title}],
            "max_tokens": 8,
            "retrieval": {"collection": COLLECTION, "query": page.text, "k": 3},
        }
        try:
            response = await self._client.post("/v1/chat/completions", json=body)
        except httpx.HTTPError:
            return ChatOutcome(phase, is_lost=True, is_cited=False, says_so=False)
        answer = response.json()
        retrieval = answer.get("trivium", {}).get("retrieval", {})
        return ChatOutcome(
            phase,
            is_lost=response.status_code != 200 or not answer.get("choices"),
            is_cited=page.document_id in {c["document_id"] for c in retrieval.get("citations", ())},
            says_so=bool(retrieval.get("missing_shards") or retrieval.get("error")),
        )


def figures(outcomes: Sequence[ChatOutcome]) -> dict[str, Any]:
    """Count lost, cited and silent answers by phase."""
    rows = {}
    for phase in (WHOLE, ONE_REPLICA, NO_SHARD):
        phase_outcomes = [outcome for outcome in outcomes if outcome.phase == phase]
        rows[phase] = {
            "answers": len(phase_outcomes),
            "lost": sum(outcome.is_lost for outcome in phase_outcomes),
            "cited": sum(outcome.is_cited for outcome in phase_outcomes),
            "say_so": sum(outcome.says_so for outcome in phase_outcomes),
            "silent": sum(outcome.is_silent for outcome in phase_outcomes),
        }
    return rows


def bars(figures: Mapping[str, Any] | None) -> list[Bar]:
    """Return bars: no answer is lost, and answers that lack a shard report it."""
    if figures is None:
        return []
    rows = list(figures.values())
    return [
        at_most("answers lost, replica and shard killed", sum(r["lost"] for r in rows), 0, ""),
        at_most(
            "answers that lack a page and do not say so", sum(r["silent"] for r in rows), 0, ""
        ),
        at_least("answers that say a shard was missing", figures[NO_SHARD]["say_so"], 1, ""),
    ]


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return the table of outcomes by phase."""
    if "losses" not in figures:
        return []
    table = Table("pool", "answers", "lost", "with their page", "say so", "silent")
    for phase, row in figures["losses"].items():
        table.add_row(phase, *map(str, row.values()))
    return [table]
