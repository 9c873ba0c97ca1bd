"""Measures what a search adds to TTFT at several rates, idle and with a full decode queue.

Chats with and without a search alternate in one open loop, so that load on the machine affects both
alike. Then the same searches are sent directly, half of them as prefill searches and half in
decode's queue, first in first out behind all that wait there, as in a single FIFO queue.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import httpx
import numpy as np
from rich.progress import Progress
from rich.table import Table

from infra.bench.results import Bar, at_most, median, percentile
from infra.handbook.handbook import HandbookQuestion, handbook, questions
from infra.handbook.library import Library, TextDocument
from infra.stack.fleet_watch import FleetWatch
from infra.stack.launcher import Stack
from schemas.errors import EngineFailed, TriviumError
from schemas.fleet import Member
from schemas.records import MemberKind, Role
from streams.log.clock import wall_ms

COLLECTION, FILLER = "handbook", "filler"
_PAGES, _DIM = 300, 384
_DEEP_K, _DEEP_TOP_M, _DEEP_ASKERS = 64, 512, 64  # of the searches that fill the decode queue
_FOUND_S, _PATIENCE_S, _LOOK_S = 300.0, 60.0, 0.1
IDLE, SATURATED = "idle", "decode queue full"
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

    def __init__(
        self, stack: Stack, books: Library, rates: Sequence[float], load_s: float, seed: int
    ) -> None:
        self.stack, self.books = stack, books
        self._rates, self._load_s = rates, load_s
        self._rng = random.Random(f"retrieval load {seed}")
        self._questions = questions(handbook(_PAGES), 1_000, seed=seed)
        self._vectors = np.random.default_rng(seed).normal(size=(4_096, _DIM)).astype(np.float32)

    async def prepare(self, fillers: int) -> None:
        """Put the handbook, and vectors for the decode queue; wait until all workers have them."""
        vectors = np.random.default_rng(0).normal(size=(fillers, _DIM)).astype(np.float32)
        await self.books.put_vectors(FILLER, vectors)
        pages = [TextDocument(page.document_id, page.text, page.title) for page in handbook(_PAGES)]
        await self.books.put(COLLECTION, pages)
        await self.books.wait_for_all(COLLECTION, pages, _FOUND_S)
        assert self.stack.fleet is not None  # the stack is running
        await wait_held_by_all(
            self.stack.fleet, {FILLER: fillers, COLLECTION: len(pages)}, _FOUND_S
        )

    def question(self) -> HandbookQuestion:
        """Return a question drawn at random."""
        return self._rng.choice(self._questions)

    async def measure(self, progress: Progress) -> Mapping[str, Any]:
        """Return the figures by rate, for an idle pool and for a full decode queue."""
        figures: dict[str, Any] = {}
        for rate in self._rates:
            name = f"{rate:g} chats/s"
            figures[name] = {IDLE: await self._measure_rate(rate, f"{name}, {IDLE}", progress)}
            async with self.full_decode_queue():
                figures[name][SATURATED] = await self._measure_rate(
                    rate, f"{name}, {SATURATED}", progress
                )
        return figures

    async def _measure_rate(self, rate: float, title: str, progress: Progress) -> dict[str, Any]:
        count = max(8, round(rate * self._load_s))
        task = progress.add_task(title, total=2 * count)
        ttft: dict[bool, list[float]] = {False: [], True: []}
        late: list[bool] = []
        searched: dict[Kind, list[float]] = {"prefill": [], "decode": []}
        url = self.stack.gateway_urls[0]
        async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S) as client:

            async def chat(number: int) -> None:
                looks_up = number % 2 == 0
                took_ms, went_without = await self._first_token_ms(client, looks_up)
                ttft[looks_up].append(took_ms)
                late.append(went_without)
                progress.advance(task)

            async def search(number: int) -> None:
                kind: Kind = "prefill" if number % 2 else "decode"
                searched[kind].append(await self._search_ms(kind))
                progress.advance(task)

            await _open_loop(chat, count, rate)
            await _open_loop(search, count, rate)
        spreads = {"with": _spread(ttft[True]), "without": _spread(ttft[False])}
        return {
            "ttft_ms": spreads,
            "added_ms": {
                name: value - before
                for name in ("p50", "p99")
                if (value := spreads["with"][name]) and (before := spreads["without"][name])
            },
            "search_ms": {kind: _spread(times) for kind, times in searched.items()},
            "late": sum(late),  # answers generated without the results of their search
        }

    async def _first_token_ms(
        self, client: httpx.AsyncClient, looks_up: bool
    ) -> tuple[float, bool]:
        """Return the ms, and whether the answer lacks its search, which was late."""
        body: dict[str, Any] = {
            "model": self.stack.settings.model.served_name,
            "messages": [{"role": "user", "content": self.question().text}],
            "max_tokens": 1,
            "temperature": 0,
        }
        if looks_up:
            body["retrieval"] = {"collection": COLLECTION}
        began_s = time.monotonic()
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        took_ms = (time.monotonic() - began_s) * 1000
        if "error" in answer:
            raise EngineFailed(f"the gateway answered: {answer}")
        return took_ms, looks_up and "error" in answer["trivium"]["retrieval"]

    async def _search_ms(self, kind: Kind) -> float:
        began_s = time.monotonic()
        await self.books.client.search_text(
            self.question().text,
            collection=COLLECTION,
            kind=kind,
            deadline_ms=wall_ms() + round(_PATIENCE_S * 1000),
        )
        return (time.monotonic() - began_s) * 1000

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
                await self.books.client.search(
                    self._vectors[rng.randrange(len(self._vectors))],
                    collection=FILLER,
                    k=_DEEP_K,
                    top_m=_DEEP_TOP_M,
                    deadline_ms=wall_ms() + 10_000,
                    kind="decode",
                )


async def _open_loop(call: Any, count: int, rate: float) -> None:
    """Start `count` calls at this rate, without waiting for earlier ones; wait for all."""
    loop, began_s = asyncio.get_running_loop(), time.monotonic()
    calls = []
    for number in range(count):
        await asyncio.sleep(max(0.0, began_s + number / rate - time.monotonic()))
        calls.append(loop.create_task(call(number)))
    await asyncio.gather(*calls)


def _spread(times: Sequence[float]) -> dict[str, float | None]:
    return {"p50": median(times), "p99": percentile(times, 99), "count": len(times)}


def bars(figures: Mapping[str, Any] | None) -> list[Bar]:
    """Return bars on what a full decode queue costs a prefill search."""
    result = []
    for rate, rows in (figures or {}).items():
        idle, full = (rows[pool]["ttft_ms"]["with"]["p99"] for pool in (IDLE, SATURATED))
        ratio = full / idle if idle and full else None
        result.append(
            at_most(f"TTFT p99 with a search, decode queue full: {rate}", ratio, 1.5, "x idle")
        )
    return result


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return the table of times to the first token and of searches."""
    if "latency" not in figures:
        return []
    table = Table(
        "load", "pool", "TTFT ms with, p50/p99", "without", "search: as prefill", "one FIFO queue",
        "late",
    )  # fmt: skip
    for rate, rows in figures["latency"].items():
        for pool, row in rows.items():
            spreads = [*row["ttft_ms"].values(), *row["search_ms"].values()]
            times = (f"{s['p50']:.0f} / {s['p99']:.0f}" for s in spreads)
            table.add_row(rate, pool, *times, str(row["late"]))
    return [table]
