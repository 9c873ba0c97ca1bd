"""Measures the response cache: the time of cached and generated answers, and stale answers.

Edits and questions alternate at random. An edit is complete when a search finds it. From then on an
answer that was cached before is stale, which its citations show. `cache.py` has the share of false
hits among pairs of questions.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.bench.benchmark import counting
from infra.bench.results import Bar, at_least, at_most, percentiles, ratio
from infra.bench.retrieval import cache
from infra.bench.retrieval.scene import Figures, Scene, citations
from infra.handbook.library import TextDocument
from workers.embed.embedders.choose import make_embedder

COLLECTION = "edited"
_WORDS = ("amber", "copper", "ivory", "velvet")
_QUESTIONS_SHARE = 0.75  # of all turns; the rest are edits
_FOUND_S = 60.0
_TOKENS_MAX, _THRESHOLD = 128, 0.8


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """An answer's time, and the texts that it cites."""

    took_ms: float
    is_cached: bool
    cited: Mapping[str, str]  # text by document


class EditedPages:
    """Edits pages, and asks questions about them."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.pages = {word: self._page(word, 0) for word in _WORDS}

    @staticmethod
    def _page(word: str, hour: int) -> TextDocument:
        return TextDocument(
            f"kettle-{word}", f"The {word} kettle of the pier sings at {hour} o'clock."
        )

    async def prepare(self) -> None:
        """Put the first version of all pages and wait until searches find them."""
        await self._scene.put(COLLECTION, self.pages.values())

    async def edit(self, word: str, hour: int) -> None:
        """Edit a page and wait until a search finds the new text."""
        page = self.pages[word] = self._page(word, hour)
        await self._scene.books.put(COLLECTION, [page])
        await self._scene.books.wait_for(COLLECTION, page, _FOUND_S)

    async def ask(self, word: str) -> TimedAnswer:
        """Ask about the page of a word and time the answer; raises EngineFailed."""
        fields = {"cache": True, "retrieval": {"collection": COLLECTION}}
        text = f"When does the {word} kettle sing?"
        answer, took_ms = await self._scene.chat(text, max_tokens=_TOKENS_MAX, **fields)
        cited = {citation["document_id"]: citation["text"] for citation in citations(answer)}
        return TimedAnswer(took_ms, "cache" in answer["trivium"], cited)

    def is_stale(self, answer: TimedAnswer) -> bool:
        """Return whether the answer cites text that its page no longer has."""
        now = {page.document_id: page.text for page in self.pages.values()}
        return any(text not in now[name] for name, text in answer.cited.items())


async def measure(scene: Scene) -> Figures:
    """Return times of answers, stale answers, and false hits among pairs of questions."""
    options = scene.options
    rng, answers, stale = random.Random(f"kept {options.seed}"), list[TimedAnswer](), 0
    progress, shelf = counting("edits and questions", options.turns), EditedPages(scene)
    await shelf.prepare()
    for turn in range(options.turns):
        word = rng.choice(_WORDS)
        if rng.random() < _QUESTIONS_SHARE:
            answers.append(await shelf.ask(word))
            stale += answers[-1].is_cached and shelf.is_stale(answers[-1])
        else:
            await shelf.edit(word, turn + 1)
        progress(advance=1)
    settings = scene.stack.settings
    embedder = await asyncio.to_thread(make_embedder, settings.embedding, settings.worker.engine)
    pair_figures = await asyncio.to_thread(
        cache.measure, embedder.embed, count=options.pairs, seed=options.seed
    )
    return {**figures(answers), "turns": options.turns, "stale": stale, "pairs": pair_figures}


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


def bars(figures: Figures) -> list[Bar]:
    """Return bars: no stale answer, faster hits, and at most one false hit in a thousand."""
    times = ratio(figures["kept_ms"]["p50"], figures["made_ms"]["p50"])
    false_share = float(_default_row(figures)["false_share"])  # from a NumPy number
    return [
        at_most(f"stale answers in {figures['turns']} edits and questions", figures["stale"], 0),
        at_least("answers that were kept", figures["kept"], 1),
        at_most("a kept answer beside one that is made, p50", times, 1.0, "x"),
        at_most("false hits among different questions", false_share, 0.001),
    ]


def rows(figures: Figures) -> Figures:
    """Return rows for a table of times, stale answers and false hits."""
    low, high = _default_row(figures)["interval"]
    times = {way: {"count": figures[way], **figures[f"{way}_ms"]} for way in ("kept", "made")}
    times["kept"] |= {"stale": figures["stale"], "false_hits": f"{low:.2%} to {high:.2%}"}
    return times
