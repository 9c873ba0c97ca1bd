"""Measures what probes cost: tokens/s with one every 32 tokens and without, and decode stalls.

Uses a real model. The usual probes are sent ahead of their place and start where the previous one
ended. Beside them it measures probes that decoding waits for, and probes that start cold. The ways
take turns, so that load on the machine affects all alike.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from rich.progress import Progress
from rich.table import Table

from infra.bench.results import Bar, at_least, at_most, median
from infra.handbook.handbook import handbook, questions
from infra.handbook.library import Library, TextDocument
from schemas.errors import EngineFailed

COLLECTION, EVERY = "probes", 32
NONE, USUAL = "without probes", f"every {EVERY} tokens"
WAYS: Mapping[str, Mapping[str, Any] | None] = {
    NONE: None,
    USUAL: {"every": EVERY},
    "lookahead off": {"every": EVERY, "lookahead": 0},
    "each starts anew": {"every": EVERY, "warm": False},
}
_PAGES, _FOUND_S, _WARM_TOKENS = 100, 300.0, 8


async def measure(
    books: Library,
    client: httpx.AsyncClient,
    model: str,
    *,
    streams: int,
    tokens: int,
    rounds: int,
    seed: int,
    progress: Progress,
) -> Mapping[str, Any]:
    """Return by way: tokens/s of `streams` answers at once, and the stalled share of decoding."""
    pages = [TextDocument(page.document_id, page.text, page.title) for page in handbook(_PAGES)]
    await books.put(COLLECTION, pages)
    await books.wait_for_all(COLLECTION, pages, _FOUND_S)
    question_texts = [
        question.text for question in questions(handbook(_PAGES), streams * rounds, seed=seed)
    ]
    rows_by_way: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    task = progress.add_task("probes", total=(rounds + 1) * len(WAYS))
    for number in range(rounds + 1):
        texts = question_texts[max(0, number - 1) * streams :][:streams]
        for way, probes in WAYS.items():
            row = await _round(client, model, texts, tokens if number else _WARM_TOKENS, probes)
            if number:  # the first one warms caches
                rows_by_way[way].append(row)
            progress.advance(task)
    return {way: _medians(rows) for way, rows in rows_by_way.items()}


async def _round(
    client: httpx.AsyncClient,
    model: str,
    texts: Sequence[str],
    tokens: int,
    probes: Mapping[str, Any] | None,
) -> dict[str, float]:
    began_s = time.monotonic()
    answers = await asyncio.gather(*(_ask(client, model, text, tokens, probes) for text in texts))
    took_s = time.monotonic() - began_s
    reports = [answer["trivium"] for answer in answers]
    stalled_ms = sum(report.get("stalled_ms", 0.0) for report in reports)
    return {
        "tokens_per_s": sum(a["usage"]["completion_tokens"] for a in answers) / took_s,
        "stalled_share": stalled_ms / (len(texts) * took_s * 1000),
        "probes": sum(report.get("probes", 0) for report in reports),
        "put_in": sum(len(_probe_citations(report)) for report in reports),
    }


def _probe_citations(report: Mapping[str, Any]) -> list[Any]:
    cited = report.get("retrieval", {}).get("citations", ())
    return [citation for citation in cited if citation.get("probe")]


async def _ask(
    client: httpx.AsyncClient,
    model: str,
    text: str,
    tokens: int,
    probes: Mapping[str, Any] | None,
) -> Mapping[str, Any]:
    retrieval: dict[str, Any] = {"collection": COLLECTION}
    if probes is not None:
        retrieval["probes"] = probes
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "retrieval": retrieval,
    }
    answer: dict[str, Any] = (await client.post("/v1/chat/completions", json=body)).json()
    if "error" in answer:
        raise EngineFailed(f"the gateway answered: {answer['error']}")
    return answer


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    return {name: median([row[name] for row in rows]) for name in rows[0]}


def bars(figures: Mapping[str, Any] | None) -> list[Bar]:
    """Return bars: nine tenths of the rate without probes, and few stalls."""
    if figures is None:
        return []
    ratio = figures[USUAL]["tokens_per_s"] / figures[NONE]["tokens_per_s"]
    return [
        at_least(f"tokens/s with probes every {EVERY} beside none", ratio, 0.9, "x"),
        at_most("decode time stalled by probes", figures[USUAL]["stalled_share"], 0.05, "share"),
    ]


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return the table of rates and stalls with and without probes."""
    if "probes" not in figures:
        return []
    table = Table("answers", "tokens/s", "stalled", "probes", "passages put in")
    for way, row in figures["probes"].items():
        table.add_row(
            way, f"{row['tokens_per_s']:.1f}", f"{row['stalled_share']:.1%}",
            f"{row['probes']:.0f}", f"{row['put_in']:.0f}",
        )  # fmt: skip
    return [table]
