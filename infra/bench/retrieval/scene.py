"""What the parts of the retrieval benchmark share: options, a running stack, and its client."""

import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from infra.bench.benchmark import option
from infra.bench.stacks import running
from infra.handbook.handbook import Page, handbook
from infra.handbook.library import Library, TextDocument, library
from infra.stack.launcher import Stack
from schemas.errors import EngineFailed
from streams.log.clock import wall_ms

PARTS = ("quality", "probes", "early", "recall", "latency", "freshness", "kept", "losses")
FOUND_S = 600.0  # timeout until searches find documents
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalOptions:
    """Sets which parts run and how much each asks."""

    only: tuple[str, ...] = option((), "these parts", choices=PARTS)
    sizes: tuple[int, ...] = option((30, 300, 3_000), "pages of the handbooks")
    questions: int = option(300, "held out, of the smallest handbook")
    streams: int = option(4, "questions at once")
    answer_tokens: int = option(256, "of each answer with probes")
    rounds: int = option(5, "of answers with probes in each way")
    prompts: int = option(20, "long ones, that are computed during a search")
    docstrings: int = option(0, "documents that are searched; 0: all")
    rates: tuple[float, ...] = option((1.0, 100.0), "chats a second")
    load_s: float = option(60.0, "s of each load")
    fillers: int = option(20_000, "vectors that searches of the decode queue walk over")
    documents: int = option(10_000, "that are ingested at once")
    turns: int = option(1_000, "edits and questions")
    pairs: int = option(4_000, "of questions, of each kind")
    kill_rate: float = option(5.0, "chats a second while workers are killed")
    kill_s: float = option(30.0, "s before and after each kill")
    seed: int = option(1)


@dataclass(frozen=True, slots=True)
class Scene:
    """A running stack, a library of its documents, and an HTTP client of its gateway."""

    stack: Stack
    books: Library
    client: httpx.AsyncClient
    options: RetrievalOptions
    shared: dict[str, Any] = field(default_factory=dict)  # what several parts use

    async def put(self, collection: str, texts: Iterable[TextDocument]) -> None:
        """Put these documents, and wait until searches find all of them."""
        documents = list(texts)
        await self.books.put(collection, documents)
        await self.books.wait_for_all(collection, documents, FOUND_S)

    async def chat(self, *texts: str, max_tokens: int, **fields: Any) -> tuple[Figures, float]:
        """Return the answer to a greedy chat, and its ms; raises EngineFailed. The last text is the
        user's, one before it the system's."""
        roles = ("system", "user")[-len(texts) :]
        body = {
            "model": self.stack.settings.model.served_name,
            "messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)],
            "max_tokens": max_tokens,
            "temperature": 0,
            **fields,
        }
        began_s = time.monotonic()
        answer: Figures = (await self.client.post("/v1/chat/completions", json=body)).json()
        took_ms = (time.monotonic() - began_s) * 1000
        if "error" in answer:
            raise EngineFailed(f"the gateway answered: {answer['error']}")
        return answer, took_ms

    async def search_ms(self, text: str, collection: str, kind: Any, patience_s: float) -> float:
        """Search a text and return the ms until its passages are here."""
        deadline_ms, began_s = wall_ms() + round(patience_s * 1000), time.monotonic()
        await self.books.client.search_text(
            text, collection=collection, kind=kind, deadline_ms=deadline_ms
        )
        return (time.monotonic() - began_s) * 1000


@asynccontextmanager
async def scene_on(
    stack: Stack, options: RetrievalOptions, patience_s: float
) -> AsyncIterator[Scene]:
    """Run the stack until the block ends. Answers may take `patience_s`."""
    async with running(stack), library(stack.settings.log) as books:
        url = stack.gateway_urls[0]
        async with httpx.AsyncClient(base_url=url, timeout=patience_s) as client:
            yield Scene(stack, books, client, options)


def page_texts(pages: int | Iterable[Page]) -> list[TextDocument]:
    """Return pages of the handbook as documents."""
    book = handbook(pages) if isinstance(pages, int) else pages
    return [TextDocument(page.document_id, page.text, page.title) for page in book]


def citations(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the passages that an answer cites."""
    return list(answer.get("trivium", {}).get("retrieval", {}).get("citations", ()))
