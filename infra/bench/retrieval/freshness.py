"""Measures how soon searches find a document under load, and the rate of ingestion.

The rate of ingestion is compared with that of the embedding model alone, on the same texts, with
the same number of threads. The difference is the cost of the log and the index.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.progress import Progress
from rich.table import Table

from infra.bench.results import Bar, at_least, at_most, median, percentile
from infra.bench.retrieval.latency import COLLECTION, ChatLoad
from infra.handbook.handbook import handbook
from infra.handbook.library import TextDocument
from workers.embed.embedders.choose import make_embedder

_FRESH = 20  # documents that are timed
_FOUND_S = 60.0
_BATCH = 32  # texts that the model alone embeds together
_LOADED = "ingested"


async def measure(load: ChatLoad, documents: int, progress: Progress) -> Mapping[str, Any]:
    """Measure freshness while the decode queue is full, then the rate of ingestion."""
    task = progress.add_task("freshness under load", total=_FRESH)
    waits_ms = []
    async with load.full_decode_queue():
        for number in range(_FRESH):
            fresh = TextDocument(
                f"fresh-{number}", f"The {_word(number)} kettle sings at {number} o'clock."
            )
            began_s = time.monotonic()
            await load.books.put(COLLECTION, [fresh])
            await load.books.wait_for(COLLECTION, fresh, _FOUND_S)
            waits_ms.append((time.monotonic() - began_s) * 1000)
            progress.advance(task)
    texts = _texts(documents)
    alone_s = await asyncio.to_thread(_embed_alone, load, [text.text for text in texts])
    task = progress.add_task("ingest", total=1)
    began_s = time.monotonic()
    await load.books.put(_LOADED, texts)
    await load.books.wait_for_all(_LOADED, texts, max(_FOUND_S, 20 * alone_s))
    ingest_s = time.monotonic() - began_s
    progress.advance(task)
    return {
        "found_ms": {"p50": median(waits_ms), "p99": percentile(waits_ms, 99), "count": _FRESH},
        "documents": documents,
        "documents_per_s": documents / ingest_s,
        "embedding_alone_per_s": documents / alone_s,
    }


def _texts(count: int) -> list[TextDocument]:
    """Return pages from the handbooks of several towns, 3 000 of each at most."""
    texts: list[TextDocument] = []
    for town in range(count // 3_000 + 1):
        pages = handbook(min(3_000, count - len(texts)), seed=100 + town)
        texts += [
            TextDocument(f"{town}-{page.document_id}", page.text, page.title) for page in pages
        ]
    return texts


def _embed_alone(load: ChatLoad, texts: Sequence[str]) -> float:
    """Return the seconds that the model takes to embed the texts in batches."""
    settings = load.stack.settings
    embedder = make_embedder(settings.embedding, settings.worker.engine)
    embedder.embed(list(texts[:_BATCH]))
    began_s = time.monotonic()
    for start in range(0, len(texts), _BATCH):
        embedder.embed(list(texts[start : start + _BATCH]))
    return time.monotonic() - began_s


def _word(number: int) -> str:
    return "".join(chr(ord("a") + int(digit)) for digit in f"{number:04d}") + "ix"


def bars(figures: Mapping[str, Any] | None) -> list[Bar]:
    """Return bars: found within two seconds, and four fifths of the model's own rate."""
    if figures is None:
        return []
    ratio = figures["documents_per_s"] / figures["embedding_alone_per_s"]
    return [
        at_most("document found under load, p99", figures["found_ms"]["p99"], 2_000, "ms"),
        at_least("ingest beside the embedding model alone", ratio, 0.8, "x"),
    ]


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return the table of freshness and ingestion."""
    row = figures.get("freshness")
    if row is None:
        return []
    table = Table("found after, p50", "p99", "documents/s ingested", "embedding alone")
    table.add_row(
        f"{row['found_ms']['p50']:.0f} ms",
        f"{row['found_ms']['p99']:.0f} ms",
        f"{row['documents_per_s']:.0f}",
        f"{row['embedding_alone_per_s']:.0f}",
    )
    return [table]
