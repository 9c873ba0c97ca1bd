"""Measures the response cache: the time of cached and generated answers, and stale answers.

Edits and questions alternate at random. An edit is complete when a search finds it. From then on an
answer that was cached before is stale, which its citations show. `cache.py` has the share of false
hits among pairs of questions.
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

from infra.bench.results import Bar, at_least, at_most, percentiles
from infra.bench.retrieval import cache
from infra.handbook.library import Library, TextDocument
from infra.stack.launcher import Stack
from schemas.errors import EngineFailed
from workers.embed.embedders.choose import make_embedder

COLLECTION = "edited"
_WORDS = ("amber", "copper", "ivory", "velvet")
_QUESTIONS_SHARE = 0.75  # of all turns; the rest are edits
_FOUND_S, _PATIENCE_S = 60.0, 60.0
_TOKENS_MAX, _THRESHOLD = 128, 0.8


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """An answer's time, and the texts that it cites."""

    took_ms: float
    is_cached: bool
    cited: Mapping[str, str]  # text by document


class EditedPages:
    """Edits pages, and asks questions about them."""

    def __init__(self, stack: Stack, books: Library, client: httpx.AsyncClient) -> None:
        self._model = stack.settings.model.served_name
        self._books, self._client = books, client
        self.pages = {word: self._page(word, 0) for word in _WORDS}

    @staticmethod
    def _page(word: str, hour: int) -> TextDocument:
        return TextDocument(
            f"kettle-{word}", f"The {word} kettle of the pier sings at {hour} o'clock."
        )

    async def prepare(self) -> None:
        """Put the first version of all pages and wait until searches find them."""
        await self._books.put(COLLECTION, self.pages.values())
        for page in self.pages.values():
            await self._books.wait_for(COLLECTION, page, _FOUND_S)

    async def edit(self, word: str, hour: int) -> None:
        """Edit a page and wait until a search finds the new text."""
        page = self.pages[word] = self._page(word, hour)
        await self._books.put(COLLECTION, [page])
        await self._books.wait_for(COLLECTION, page, _FOUND_S)

    async def ask(self, word: str) -> TimedAnswer:
        """Ask about the page of a word and time the answer; raises EngineFailed."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": f"When does the {word} kettle sing?"}],
            "max_tokens": _TOKENS_MAX,
            "temperature": 0,
            "cache": True,
            "retrieval": {"collection": COLLECTION},
        }
        began_s = time.monotonic()
        answer = (await self._client.post("/v1/chat/completions", json=body)).json()
        took_ms = (time.monotonic() - began_s) * 1000
        if "error" in answer:
            raise EngineFailed(f"the gateway answered: {answer['error']}")
        report = answer["trivium"]
        citations = report.get("retrieval", {}).get("citations", ())
        cited = {citation["document_id"]: citation["text"] for citation in citations}
        return TimedAnswer(took_ms, "cache" in report, cited)

    def is_stale(self, answer: TimedAnswer) -> bool:
        """Return whether the answer cites text that its page no longer has."""
        now = {page.document_id: page.text for page in self.pages.values()}
        return any(text not in now[name] for name, text in answer.cited.items())


async def measure(
    stack: Stack, books: Library, turns: int, pairs: int, seed: int, progress: Progress
) -> Mapping[str, Any]:
    """Return times of answers, stale answers, and false hits among `pairs` pairs of each kind."""
    rng, answers, stale = random.Random(f"kept {seed}"), [], 0
    task = progress.add_task("edits and questions", total=turns)
    url = stack.gateway_urls[0]
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S) as client:
        shelf = EditedPages(stack, books, client)
        await shelf.prepare()
        for turn in range(turns):
            word = rng.choice(_WORDS)
            if rng.random() < _QUESTIONS_SHARE:
                answers.append(await shelf.ask(word))
                stale += answers[-1].is_cached and shelf.is_stale(answers[-1])
            else:
                await shelf.edit(word, turn + 1)
            progress.advance(task)
    settings = stack.settings
    embedder = await asyncio.to_thread(make_embedder, settings.embedding, settings.worker.engine)
    pair_figures = await asyncio.to_thread(cache.measure, embedder.embed, count=pairs, seed=seed)
    return {**figures(answers), "turns": turns, "stale": stale, "pairs": pair_figures}


def figures(answers: Sequence[TimedAnswer]) -> dict[str, Any]:
    """Return counts and ms of cached (`kept`) and generated (`made`) answers."""
    cached_ms = [answer.took_ms for answer in answers if answer.is_cached]
    fresh_ms = [answer.took_ms for answer in answers if not answer.is_cached]
    return {
        "kept_ms": percentiles(cached_ms), "made_ms": percentiles(fresh_ms),
        "kept": len(cached_ms), "made": len(fresh_ms),
    }  # fmt: skip


def _default_row(figures: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the false hits at the gateway's default settings."""
    rows: list[Mapping[str, Any]] = figures["pairs"]["rows"]
    return next(row for row in rows if row["guard"] and row["threshold"] == _THRESHOLD)


def bars(figures: Mapping[str, Any] | None) -> list[Bar]:
    """Return bars: no stale answer, faster hits, and at most one false hit in a thousand."""
    if figures is None:
        return []
    cached_ms, fresh_ms = figures["kept_ms"]["p50"], figures["made_ms"]["p50"]
    ratio = cached_ms / fresh_ms if cached_ms and fresh_ms else None
    false_share = float(_default_row(figures)["false_share"])  # from a NumPy number
    return [
        at_most(
            f"stale answers in {figures['turns']} edits and questions", figures["stale"], 0, ""
        ),
        at_least("answers that were kept", figures["kept"], 1, ""),
        at_most("a kept answer beside one that is made, p50", ratio, 1.0, "x"),
        at_most("false hits among different questions", false_share, 0.001, ""),
    ]


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return the table of times, stale answers and false hits."""
    row = figures.get("kept")
    if row is None:
        return []
    table = Table("answers", "count", "p50 ms", "p99 ms", "stale", "false hits, 95 %")
    low, high = _default_row(row)["interval"]
    for way, stale, false in (
        ("kept", str(row["stale"]), f"{low:.2%} to {high:.2%}"), ("made", "", "")
    ):  # fmt: skip
        times = [f"{ms:.0f}" if ms is not None else "-" for ms in row[f"{way}_ms"].values()]
        table.add_row(way, str(row[way]), *times, stale, false)
    return [table]
