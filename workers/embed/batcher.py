"""Embeds texts in one thread, batch after batch, while callers await their vectors.

`workers/embed/scheduler.py` chooses the batches. Nothing here reads or writes the log.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from schemas.errors import EngineFailed
from schemas.retrieval import Vector
from schemas.rules.letters import plain_letters
from workers.embed.embedders.protocol import Embedder, Text
from workers.embed.scheduler import EmbedItem, EmbedJob, EmbedScheduler, Urgency

log = logging.getLogger("trivium.embedding")
_SMOOTH = 0.2  # weight of a new measurement in the moving average


@dataclass(slots=True, eq=False)
class _PendingEmbed:
    vectors: Vector
    missing: int
    completion: asyncio.Future[None] = field(default_factory=lambda: asyncio.Future())


class Batcher:
    """The batches of one embedder; any task of the event loop calls `embed` while `run` runs."""

    def __init__(self, embedder: Embedder, batch_tokens: int) -> None:
        self.embedder = embedder
        self.ms_per_text = 0.0
        self._scheduler = EmbedScheduler(batch_tokens)
        self._pending: dict[EmbedJob, _PendingEmbed] = {}
        self._work_added = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "embed")

    @property
    def waiting(self) -> int:
        """Return the number of texts that wait."""
        return self._scheduler.waiting

    async def embed(
        self, texts: Sequence[Text], tokens: Sequence[int], urgency: Urgency, tenant: str = ""
    ) -> Vector:
        """Return the texts' vectors, shape (texts, dim); raises EngineFailed if one fails."""
        job = EmbedJob(texts, tokens, urgency, tenant)
        pending = _PendingEmbed(np.zeros((len(texts), self.embedder.dim), np.float32), len(texts))
        if texts:
            self._pending[job] = pending
            self._scheduler.add(job)
            self._work_added.set()
            try:
                await pending.completion
            finally:
                job.dropped = True
                self._pending.pop(job, None)
        return pending.vectors

    async def run(self) -> None:
        """Embed batch after batch until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            items = self._scheduler.batch()
            if not items:
                self._work_added.clear()
                await self._work_added.wait()
                continue
            began_s = time.monotonic()
            rows = await loop.run_in_executor(self._thread, self._embed_items, items)
            self._deliver(items, rows)
            ms = (time.monotonic() - began_s) * 1000 / len(items)
            self.ms_per_text += (ms - self.ms_per_text) * (_SMOOTH if self.ms_per_text else 1)

    def close(self) -> None:
        """Wait for the batch in flight."""
        self._thread.shutdown()

    def _embed_items(self, items: list[EmbedItem]) -> list[Vector | Exception]:
        """Embed a batch. If it fails, try each text alone, so that only the bad text fails."""
        try:
            return list(self.embedder.embed([_plain(item.text) for item in items]))
        except Exception as error:
            if len(items) == 1:
                return [error]
        return [row for item in items for row in self._embed_items([item])]

    def _deliver(self, items: list[EmbedItem], rows: list[Vector | Exception]) -> None:
        for item, row in zip(items, rows, strict=True):
            pending = self._pending.get(item.job)
            if pending is None or pending.completion.done():
                continue
            if isinstance(row, Exception):
                item.job.dropped = True
                log.warning("a text cannot be embedded: %s: %s", type(row).__name__, row)
                failed = EngineFailed(f"the embedder failed: {type(row).__name__}: {row}")
                pending.completion.set_exception(failed)
                continue
            pending.vectors[item.number] = row
            pending.missing -= 1
            if not pending.missing:
                pending.completion.set_result(None)


def _plain(text: Text) -> Text:
    return plain_letters(text) if isinstance(text, str) else text
