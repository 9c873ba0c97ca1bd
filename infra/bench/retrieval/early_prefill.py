"""Measures what a search adds to the TTFT of a long prompt whose fixed part is computed meanwhile.

Uses a real model. Each prompt is new, so no cache has it. The time to the first token with a search
is compared with the slower of its two parts: the same kind of prompt without a search, and a search
alone. The ways take turns, so that load on the machine affects all alike.
"""

import random
import time
from collections.abc import Mapping
from typing import Any

import httpx
from rich.progress import Progress
from rich.table import Table

from infra.bench.results import Bar, at_most, median
from infra.handbook.handbook import HandbookQuestion, handbook, questions
from infra.handbook.library import Library, TextDocument
from schemas.errors import EngineFailed
from streams.log.clock import wall_ms

COLLECTION = "early"
PROMPT, SEARCH, BOTH = "prompt alone", "search alone", "both"
_PAGES, _FOUND_S, _PATIENCE_MS = 100, 300.0, 60_000
_WORDS = 900  # of the fixed part; about 1 200 tokens


async def measure(
    books: Library,
    client: httpx.AsyncClient,
    model: str,
    *,
    prompts: int,
    seed: int,
    progress: Progress,
) -> Mapping[str, Any]:
    """Return the median ms of each way, and the median tokens of the prompts."""
    pages = [TextDocument(page.document_id, page.text, page.title) for page in handbook(_PAGES)]
    await books.put(COLLECTION, pages)
    await books.wait_for_all(COLLECTION, pages, _FOUND_S)
    rng = random.Random(f"early {seed}")
    words = " ".join(page.text for page in pages).split()
    sample = questions(handbook(_PAGES), prompts + 1, seed=seed)
    times: dict[str, list[float]] = {PROMPT: [], SEARCH: [], BOTH: []}
    tokens: list[float] = []
    task = progress.add_task("early prefill", total=3 * len(sample))
    for number, question in enumerate(sample):
        ms = {}
        ms[PROMPT], read = await _first_token(client, model, rng, words, question, looks_up=False)
        progress.advance(task)
        ms[SEARCH] = await _search(books, question)
        progress.advance(task)
        ms[BOTH], _ = await _first_token(client, model, rng, words, question, looks_up=True)
        progress.advance(task)
        if number:  # the first one warms models
            tokens.append(read)
            for way, took_ms in ms.items():
                times[way].append(took_ms)
    medians = {way: median(way_ms) for way, way_ms in times.items()}
    return {"ms": medians, "prompt_tokens": median(tokens), "prompts": prompts}


async def _first_token(
    client: httpx.AsyncClient,
    model: str,
    rng: random.Random,
    words: list[str],
    question: HandbookQuestion,
    *,
    looks_up: bool,
) -> tuple[float, int]:
    """Return the ms of a call for one token, and the tokens of its prompt; raises EngineFailed."""
    fixed = " ".join(rng.choices(words, k=_WORDS))
    body: dict[str, Any] = {
        "model": model,
        "messages": [
            {"role": "system", "content": fixed},
            {"role": "user", "content": question.text},
        ],
        "max_tokens": 1,
        "temperature": 0,
    }
    if looks_up:
        body["retrieval"] = {"collection": COLLECTION}
    began_s = time.monotonic()
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    took_ms = (time.monotonic() - began_s) * 1000
    if "error" in answer or "error" in answer["trivium"].get("retrieval", {}):
        raise EngineFailed(f"expected an answer with its search, found {answer}")
    return took_ms, answer["usage"]["prompt_tokens"]


async def _search(books: Library, question: HandbookQuestion) -> float:
    began_s = time.monotonic()
    await books.client.search_text(
        question.text,
        collection=COLLECTION,
        kind="prefill",
        deadline_ms=wall_ms() + _PATIENCE_MS,
    )
    return (time.monotonic() - began_s) * 1000


def bars(figures: Mapping[str, Any] | None) -> list[Bar]:
    """Return the bar: hardly more than the slower part alone."""
    if figures is None:
        return []
    ms = figures["ms"]
    ratio = ms[BOTH] / max(ms[PROMPT], ms[SEARCH])
    return [at_most("TTFT of a long prompt with a search", ratio, 1.05, "x the slower part")]


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return the table of the two parts alone, and of both."""
    if "early" not in figures:
        return []
    row = figures["early"]
    title = f"median ms to the first token, prompts of {row['prompt_tokens']:.0f} tokens"
    table = Table(*row["ms"], title=title)
    table.add_row(*(f"{value:.0f}" for value in row["ms"].values()))
    return [table]
