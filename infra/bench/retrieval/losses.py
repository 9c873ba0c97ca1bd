"""Counts lost and silent answers when a shard replica is killed, and then a whole shard.

The documents have two shards, one with two replicas; engines are simulated. Chats arrive at a rate.
Each searches for one page by the page's words, so its answer must cite that page. An answer is lost
if the call fails. It is silent if it lacks its page and does not report that a shard was missing or
that the search failed.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from infra.bench.benchmark import counting
from infra.bench.results import Bar, at_least, at_most
from infra.bench.retrieval.scene import Figures, Scene, citations, page_texts
from infra.handbook.handbook import Page, handbook
from schemas.errors import EngineFailed

COLLECTION = "handbook"
WHOLE, ONE_REPLICA, NO_SHARD = "whole", "one replica killed", "one shard killed"
# One of two replicas of shard 0, and all of shard 1.
VICTIMS = {WHOLE: "", ONE_REPLICA: "retrieval-2", NO_SHARD: "retrieval-1"}
_PAGES = 40


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


async def measure(scene: Scene) -> Figures:
    """Return counts by phase: nothing is killed, a shard replica, and then a shard."""
    pages, options, chats = handbook(_PAGES), scene.options, list[asyncio.Task[ChatOutcome]]()
    await scene.put(COLLECTION, page_texts(pages))
    rng, progress = random.Random(f"losses {options.seed}"), counting("kills", len(VICTIMS))
    for phase, victim in VICTIMS.items():
        if victim:
            await scene.stack.kill(victim)
        began_s = time.monotonic()
        for number in range(round(options.kill_rate * options.kill_s)):
            await asyncio.sleep(max(0.0, began_s + number / options.kill_rate - time.monotonic()))
            chats.append(asyncio.create_task(_chat(scene, phase, rng.choice(pages))))
        await asyncio.sleep(max(0.0, began_s + options.kill_s - time.monotonic()))
        progress(advance=1)
    return figures(await asyncio.gather(*chats))


async def _chat(scene: Scene, phase: str, page: Page) -> ChatOutcome:
    retrieval = {"collection": COLLECTION, "query": page.text, "k": 3}
    try:
        answer, _ = await scene.chat(page.title, max_tokens=8, retrieval=retrieval)
    except (httpx.HTTPError, EngineFailed):
        return ChatOutcome(phase, is_lost=True, is_cited=False, says_so=False)
    report = answer.get("trivium", {}).get("retrieval", {})
    return ChatOutcome(
        phase,
        is_lost=not answer.get("choices"),
        is_cited=page.document_id in {citation["document_id"] for citation in citations(answer)},
        says_so=bool(report.get("missing_shards") or report.get("error")),
    )


def figures(outcomes: Sequence[ChatOutcome]) -> Figures:
    """Count lost, cited and silent answers by phase."""
    rows = {}
    for phase in VICTIMS:
        phase_outcomes = [outcome for outcome in outcomes if outcome.phase == phase]
        rows[phase] = {
            "answers": len(phase_outcomes),
            "lost": sum(outcome.is_lost for outcome in phase_outcomes),
            "cited": sum(outcome.is_cited for outcome in phase_outcomes),
            "say_so": sum(outcome.says_so for outcome in phase_outcomes),
            "silent": sum(outcome.is_silent for outcome in phase_outcomes),
        }
    return rows


def bars(figures: Figures) -> list[Bar]:
    """Return bars: no answer is lost, and answers that lack a shard report it."""
    counts = {name: sum(row[name] for row in figures.values()) for name in ("lost", "silent")}
    return [
        at_most("answers lost, replica and shard killed", counts["lost"], 0),
        at_most("answers that lack a page and do not say so", counts["silent"], 0),
        at_least("answers that say a shard was missing", figures[NO_SHARD]["say_so"], 1),
    ]
