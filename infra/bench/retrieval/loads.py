"""Parts of the retrieval benchmark under load, on simulated engines.

`latency`: what a search adds to TTFT at several rates, idle and with a full decode queue. Chats
with and without a search alternate in one open loop, so that load on the machine affects both
alike. Then the same searches are sent directly, half of them as prefill searches and half in
decode's queue, first in first out behind all that wait there, as in a single FIFO queue.
`freshness`: how soon searches find a document then, and the rate of ingestion beside that of the
embedding model alone, on the same texts with as many threads; the difference is the cost of the log
and the index.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import numpy as np

from infra.bench.benchmark import counting, measuring
from infra.bench.results import Bar, at_least, at_most, percentiles, ratio
from infra.bench.retrieval.scene import FOUND_S, Figures, Scene, page_texts
from infra.handbook.handbook import handbook, questions
from infra.handbook.library import TextDocument
from infra.stack.fleet_watch import FleetWatch
from schemas.errors import EngineFailed, TriviumError
from schemas.fleet import Member
from schemas.records import MemberKind, Role
from streams.log.clock import wall_ms
from workers.embed.embedders.choose import make_embedder

COLLECTION, FILLER, INGESTED = "handbook", "filler", "ingested"
PATIENCE_S = 60.0
IDLE, SATURATED = "idle", "decode queue full"
_PAGES, _DIM = 300, 384
_DEEP_K, _DEEP_TOP_M, _DEEP_ASKERS = 64, 512, 64  # of the searches that fill the decode queue
_FRESH = 20  # documents that are timed
_BATCH = 32  # texts that the model alone embeds together
_LOOK_S = 0.1
Kind = Literal["prefill", "decode"]


async def wait_held_by_all(fleet: FleetWatch, counts: Mapping[str, int], within_s: float) -> None:
    """Wait until every retrieval worker has at least these counts of documents by collection, since
    the next search may go to another shard replica. Raises EngineFailed after `within_s`.
    """
    end_s = time.monotonic() + within_s
    while late := [
        member.member_id
        for member in fleet.view.living(MemberKind.WORKER, wall_ms())
        if Role.RETRIEVAL in member.registration.roles and not _holds(member, counts)
    ]:
        if time.monotonic() > end_s:
            raise EngineFailed(f"not all documents within {within_s:.0f} s: {', '.join(late)}")
        await asyncio.sleep(_LOOK_S)


def _holds(member: Member, counts: Mapping[str, int]) -> bool:
    states = member.search.collections if member.search else ()
    document_counts = {state.name: state.documents for state in states}
    return all(document_counts.get(name, 0) >= count for name, count in counts.items())


class ChatLoad:
    """Sends chats and searches to one stack."""

    def __init__(self, scene: Scene) -> None:
        seed = scene.options.seed
        self._scene, self._rng = scene, random.Random(f"retrieval load {seed}")
        self._questions = questions(handbook(_PAGES), 1_000, seed=seed)
        self._vectors = np.random.default_rng(seed).normal(size=(4_096, _DIM)).astype(np.float32)

    async def prepare(self) -> None:
        """Put the handbook, and vectors for the decode queue; wait until all workers have them."""
        fillers = self._scene.options.fillers
        vectors = np.random.default_rng(0).normal(size=(fillers, _DIM)).astype(np.float32)
        await self._scene.books.put_vectors(FILLER, vectors)
        await self._scene.put(COLLECTION, page_texts(_PAGES))
        assert self._scene.stack.fleet is not None  # the stack is running
        counts = {FILLER: fillers, COLLECTION: _PAGES}
        await wait_held_by_all(self._scene.stack.fleet, counts, FOUND_S)

    async def latency(self) -> Figures:
        """Return the figures by rate, for an idle pool and for a full decode queue."""
        figures: dict[str, Any] = {}
        for rate in self._scene.options.rates:
            name = f"{rate:g} chats/s"
            figures[name] = {IDLE: await self._measure_rate(rate, f"{name}, {IDLE}")}
            async with self.full_decode_queue():
                row = await self._measure_rate(rate, f"{name}, {SATURATED}")
            figures[name][SATURATED] = row
        return figures

    async def _measure_rate(self, rate: float, title: str) -> dict[str, Any]:
        count = max(8, round(rate * self._scene.options.load_s))
        progress = counting(title, 2 * count)
        ttft: dict[bool, list[float]] = {False: [], True: []}
        searched: dict[Kind, list[float]] = {"prefill": [], "decode": []}
        late = 0

        async def chat(number: int) -> None:
            nonlocal late
            looks_up = number % 2 == 0
            fields = {"retrieval": {"collection": COLLECTION}} if looks_up else {}
            answer, took_ms = await self._scene.chat(self._question(), max_tokens=1, **fields)
            ttft[looks_up].append(took_ms)
            late += looks_up and "error" in answer["trivium"]["retrieval"]
            progress(advance=1)

        async def search(number: int) -> None:
            kind: Kind = "prefill" if number % 2 else "decode"
            took_ms = await self._scene.search_ms(self._question(), COLLECTION, kind, PATIENCE_S)
            searched[kind].append(took_ms)
            progress(advance=1)

        for call in (chat, search):
            await _open_loop(call, count, rate)
        spreads = {"with": _spread(ttft[True]), "without": _spread(ttft[False])}
        return {
            "ttft_ms": spreads,
            "added_ms": {
                name: value - before
                for name in ("p50", "p99")
                if (value := spreads["with"][name]) and (before := spreads["without"][name])
            },
            "search_ms": {kind: _spread(times) for kind, times in searched.items()},
            "late": late,  # answers generated without the results of their search
        }

    def _question(self) -> str:
        return self._rng.choice(self._questions).text

    @asynccontextmanager
    async def full_decode_queue(self) -> AsyncIterator[None]:
        """Run deep searches until the block ends, more at once than there are places."""
        askers = [asyncio.create_task(self._ask_deep(n)) for n in range(_DEEP_ASKERS)]
        try:
            yield
        finally:
            for asker in askers:
                asker.cancel()
            await asyncio.gather(*askers, return_exceptions=True)

    async def _ask_deep(self, number: int) -> None:
        rng = random.Random(number)
        while True:
            with suppress(TriviumError):
                await self._scene.books.client.search(
                    self._vectors[rng.randrange(len(self._vectors))],
                    collection=FILLER,
                    k=_DEEP_K,
                    top_m=_DEEP_TOP_M,
                    deadline_ms=wall_ms() + 10_000,
                    kind="decode",
                )

    async def freshness(self) -> Figures:
        """Measure freshness while the decode queue is full, then the rate of ingestion."""
        progress, waits_ms = counting("freshness under load", _FRESH), list[float]()
        books, documents = self._scene.books, self._scene.options.documents
        async with self.full_decode_queue():
            for number in range(_FRESH):
                text = f"The {_word(number)} kettle sings at {number} o'clock."
                fresh = TextDocument(f"fresh-{number}", text)
                began_s = time.monotonic()
                await books.put(COLLECTION, [fresh])
                await books.wait_for(COLLECTION, fresh, PATIENCE_S)
                waits_ms.append((time.monotonic() - began_s) * 1000)
                progress(advance=1)
        texts = _town_texts(documents)
        alone_s = await asyncio.to_thread(self._embed_alone, [text.text for text in texts])
        with measuring("ingest"):
            began_s = time.monotonic()
            await books.put(INGESTED, texts)
            await books.wait_for_all(INGESTED, texts, max(PATIENCE_S, 20 * alone_s))
            ingest_s = time.monotonic() - began_s
        return {
            "found_ms": _spread(waits_ms),
            "documents": documents,
            "documents_per_s": documents / ingest_s,
            "embedding_alone_per_s": documents / alone_s,
        }

    def _embed_alone(self, texts: Sequence[str]) -> float:
        """Return the seconds that the model takes to embed the texts in batches."""
        settings = self._scene.stack.settings
        embedder = make_embedder(settings.embedding, settings.worker.engine)
        embedder.embed(list(texts[:_BATCH]))
        began_s = time.monotonic()
        for start in range(0, len(texts), _BATCH):
            embedder.embed(list(texts[start : start + _BATCH]))
        return time.monotonic() - began_s


async def _prepared(scene: Scene) -> ChatLoad:
    """Return the load of this scene. The first call puts its documents."""
    if (load := scene.shared.get(FILLER)) is None:
        load = scene.shared[FILLER] = ChatLoad(scene)
        await load.prepare()
    return load


async def latency(scene: Scene) -> Figures:
    """Return times to the first token and of searches."""
    return await (await _prepared(scene)).latency()


async def freshness(scene: Scene) -> Figures:
    """Return how soon documents are found, and how fast they are ingested."""
    return await (await _prepared(scene)).freshness()


async def _open_loop(call: Any, count: int, rate: float) -> None:
    """Start `count` calls at this rate, without waiting for earlier ones; wait for all."""
    loop, began_s = asyncio.get_running_loop(), time.monotonic()
    calls = []
    for number in range(count):
        await asyncio.sleep(max(0.0, began_s + number / rate - time.monotonic()))
        calls.append(loop.create_task(call(number)))
    await asyncio.gather(*calls)


def _spread(times: Sequence[float]) -> dict[str, float | None]:
    return {**percentiles(times), "count": len(times)}


def _town_texts(count: int) -> list[TextDocument]:
    """Return pages from the handbooks of several towns, 3 000 of each at most."""
    texts: list[TextDocument] = []
    for town in range(count // 3_000 + 1):
        pages = handbook(min(3_000, count - len(texts)), seed=100 + town)
        texts += [TextDocument(f"{town}-{p.document_id}", p.text, p.title) for p in pages]
    return texts


def _word(number: int) -> str:
    return "".join(chr(ord("a") + int(digit)) for digit in f"{number:04d}") + "ix"


def latency_bars(figures: Figures) -> list[Bar]:
    """Return bars on what a full decode queue costs a prefill search."""
    result = []
    for rate, rows in figures.items():
        idle, full = (rows[pool]["ttft_ms"]["with"]["p99"] for pool in (IDLE, SATURATED))
        label = f"TTFT p99 with a search, decode queue full: {rate}"
        result.append(at_most(label, ratio(full, idle), 1.5, "x idle"))
    return result


def freshness_bars(figures: Figures) -> list[Bar]:
    """Return bars: found within two seconds, and four fifths of the model's own rate."""
    rate = figures["documents_per_s"] / figures["embedding_alone_per_s"]
    return [
        at_most("document found under load, p99", figures["found_ms"]["p99"], 2_000, "ms"),
        at_least("ingest beside the embedding model alone", rate, 0.8, "x"),
    ]
