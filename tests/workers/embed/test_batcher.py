"""Texts of many askers in common batches, in one thread."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from schemas.errors import EngineFailed
from schemas.retrieval import Vector
from tests.waiting import PATIENCE_S, meanwhile, until
from workers.embed.batcher import Batcher
from workers.embed.embedders.hashed import HashEmbedder
from workers.embed.embedders.protocol import Text
from workers.embed.scheduler import Urgency


class Slow(HashEmbedder):
    """Waits for the test before each batch, and fails over some texts."""

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
    made = Batcher(embedder, batch_tokens=100)
    try:
        async with meanwhile(made.run()):
            yield made
    finally:
        made.close()


async def test_who_comes_while_a_batch_is_computed_shares_the_next_one() -> None:
    slow = Slow()
    async with batcher(slow) as made:
        ask = made.embed
        first = asyncio.create_task(ask(["a", "b"], [9, 9], Urgency.DOCUMENT))
        await until(lambda: slow.batches == [["a", "b"]])
        one = asyncio.create_task(ask(["one"], [9], Urgency.QUERY))
        late = asyncio.create_task(ask(["c"] * 12, [9] * 12, Urgency.DOCUMENT))
        two = asyncio.create_task(ask(["two"], [9], Urgency.QUERY))
        await until(lambda: made.waiting == 14)
        slow.let(2)
        plain = HashEmbedder()
        assert np.array_equal(await one, plain.embed(["one"]))
        assert np.array_equal(await two, plain.embed(["two"]))
        assert np.array_equal(await first, plain.embed(["a", "b"]))
        slow.let(2)
        assert np.array_equal(await late, plain.embed(["c"] * 12))
        assert [len(each) for each in slow.batches] == [2, 2, 11, 1]
        assert made.ms_per_text > 0 and made.waiting == 0
        assert (await ask([], [], Urgency.QUERY)).shape == (0, plain.dim)


async def test_a_text_that_cannot_be_embedded_fails_alone() -> None:
    slow = Slow()
    slow.let(9)
    async with batcher(slow) as made:
        asked = [
            asyncio.create_task(made.embed([text], [9], Urgency.QUERY))
            for text in ("good", "poison", "better")
        ]
        await asyncio.wait(asked)
        assert [task.exception() is None for task in asked] == [True, False, True]
        with pytest.raises(EngineFailed, match="ValueError: not this one"):
            asked[1].result()


async def test_who_gives_up_is_not_computed_for() -> None:
    slow = Slow()
    async with batcher(slow) as made:
        first = asyncio.create_task(made.embed(["a"], [9], Urgency.QUERY))
        await until(lambda: slow.batches == [["a"]])
        second = asyncio.create_task(made.embed(["b"] * 50, [9] * 50, Urgency.QUERY))
        await until(lambda: made.waiting == 50)
        second.cancel()
        await asyncio.wait([second])
        third = asyncio.create_task(made.embed(["c"], [9], Urgency.QUERY))
        await until(lambda: made.waiting == 51)
        slow.let(9)
        await first
        await third
        assert slow.batches == [["a"], ["c"]]
