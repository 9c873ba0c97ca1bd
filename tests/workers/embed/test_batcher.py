"""Texts of many askers in common batches, in one thread."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from schemas.errors import EngineFailed
from schemas.retrieval import Vector
from tests.waits import PATIENCE_S, meanwhile, until
from workers.embed.batcher import Batcher
from workers.embed.embedders.hashed import HashEmbedder
from workers.embed.embedders.protocol import Text
from workers.embed.scheduler import Urgency


class Slow(HashEmbedder):
    """Waits for the test before each batch, and fails on texts with poison."""

    def __init__(self) -> None:
        self.batches: list[list[Text]] = []
        self.gate = threading.Semaphore(0)

    def embed(self, texts: Sequence[Text]) -> Vector:
        self.batches.append(list(texts))
        assert self.gate.acquire(timeout=PATIENCE_S)
        if any("poison" in text for text in texts):
            raise ValueError("not this one")
        return super().embed(texts)

    def let(self, batches: int) -> None:
        self.gate.release(batches)


@asynccontextmanager
async def batcher(embedder: HashEmbedder) -> AsyncIterator[Batcher]:
    text_batcher = Batcher(embedder, batch_tokens=100)
    try:
        async with meanwhile(text_batcher.run()):
            yield text_batcher
    finally:
        text_batcher.close()


async def test_batcher_joins_later_texts_in_next_batch() -> None:
    slow = Slow()
    async with batcher(slow) as text_batcher:
        ask = text_batcher.embed
        first = asyncio.create_task(ask(["a", "b"], [9, 9], Urgency.DOCUMENT))
        await until(lambda: slow.batches == [["a", "b"]])
        first_query = asyncio.create_task(ask(["one"], [9], Urgency.QUERY))
        late = asyncio.create_task(ask(["c"] * 12, [9] * 12, Urgency.DOCUMENT))
        second_query = asyncio.create_task(ask(["two"], [9], Urgency.QUERY))
        await until(lambda: text_batcher.waiting == 14)
        slow.let(2)
        plain = HashEmbedder()
        assert np.array_equal(await first_query, plain.embed(["one"]))
        assert np.array_equal(await second_query, plain.embed(["two"]))
        assert np.array_equal(await first, plain.embed(["a", "b"]))
        slow.let(2)
        assert np.array_equal(await late, plain.embed(["c"] * 12))
        assert [len(batch) for batch in slow.batches] == [2, 2, 11, 1]
        assert text_batcher.ms_per_text > 0 and text_batcher.waiting == 0
        assert (await ask([], [], Urgency.QUERY)).shape == (0, plain.dim)


async def test_batcher_fails_only_invalid_text() -> None:
    slow = Slow()
    slow.let(9)
    async with batcher(slow) as text_batcher:
        embeddings = [
            asyncio.create_task(text_batcher.embed([text], [9], Urgency.QUERY))
            for text in ("good", "poison", "better")
        ]
        await asyncio.wait(embeddings)
        assert [task.exception() is None for task in embeddings] == [True, False, True]
        with pytest.raises(EngineFailed, match="ValueError: not this one"):
            embeddings[1].result()


async def test_batcher_skips_cancelled_texts() -> None:
    slow = Slow()
    async with batcher(slow) as text_batcher:
        first = asyncio.create_task(text_batcher.embed(["a"], [9], Urgency.QUERY))
        await until(lambda: slow.batches == [["a"]])
        second = asyncio.create_task(text_batcher.embed(["b"] * 50, [9] * 50, Urgency.QUERY))
        await until(lambda: text_batcher.waiting == 50)
        second.cancel()
        await asyncio.wait([second])
        third = asyncio.create_task(text_batcher.embed(["c"], [9], Urgency.QUERY))
        await until(lambda: text_batcher.waiting == 51)
        slow.let(9)
        await first
        await third
        assert slow.batches == [["a"], ["c"]]
