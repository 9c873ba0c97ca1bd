"""A router that searches for its requests on a real broker, with a shard that the test plays."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from schemas.records import (
    Hits,
    MemberKind,
    MemberState,
    Request,
    RetrievalRequest,
    Retrieved,
    Role,
    SearchCapability,
    TokenFrame,
    Work,
)
from schemas.retrieval import pack_vector
from schemas.settings import LogSettings
from streams.core.requests.context import with_context
from streams.log.clients import AssignedReader
from streams.log.clock import wall_ms
from streams.log.membership import Membership
from tests.streams.agents.stage import Stage, fresh, of, router, stage, worker
from tests.streams.builders import passage, retrieval
from tests.waits import run

pytestmark = pytest.mark.kafka
FOUND = (passage(1), passage(2))


@asynccontextmanager
async def shard(on: Stage) -> AsyncIterator[list[RetrievalRequest]]:
    """The only shard: answers every retrieval by words, and has a list of them."""
    member = Membership(
        on.log, on.codec, on.producer,
        member_id="retrieval-a", kind=MemberKind.WORKER, roles=[Role.RETRIEVAL],
    )  # fmt: skip
    member.search = SearchCapability(shard=0, shards=1, backend="cpu", slots=8)
    await member.join()
    member.set_state(MemberState.READY)
    reader = AssignedReader(
        on.log, "retrieval.prefill", list(range(on.log.retrieval_partitions)), client_id="shard"
    )
    await reader.start("earliest")
    requests: list[RetrievalRequest] = []

    async def answer() -> None:
        while True:
            for record in await reader.batch():
                requests.append(on.codec.decode(record.value))
                at = requests[-1].reply_partition
                await (await on.producer.send("hits", hits(requests[-1]), key="x", partition=at))

    tasks = [asyncio.create_task(member.run()), asyncio.create_task(answer())]
    try:
        yield requests
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await reader.stop()
        await member.leave()


def hits(request: RetrievalRequest) -> Hits:
    return Hits(
        retrieval_id=request.retrieval_id, request_id=request.request_id, worker_id="retrieval-a",
        shard=0, shards=1, collection=request.collection, at_ms=wall_ms(), mode="words",
        word_ids=tuple(hit.passage_id for hit in FOUND), word_scores=pack_vector([9.0, 4.0]),
        passages=FOUND, extends=1, wait_ms=0.5, took_ms=2.0,
    )  # fmt: skip


def asking(request_id: str, **changes: Any) -> Request:
    return fresh(request_id, retrieval=retrieval(wall_ms() + 60_000, mode="words", **changes))


def tells(request_id: str) -> Any:
    return lambda record: (
        isinstance(record, TokenFrame)
        and any(notice.request_id == request_id for notice in record.retrieved)
    )


async def leased(on: Stage) -> None:
    """The router has a partition of hits."""
    await on.until(
        "fleet", lambda r: any(lease.topic == "hits" for lease in getattr(r, "leases", ()))
    )


def test_prompt_has_same_passages_before_and_after_takeover(kafka: LogSettings) -> None:
    """One search serves both routers, and both notify the reader alike."""

    async def main() -> None:
        async with stage(kafka) as on, shard(on) as requests:
            async with router(kafka):
                await leased(on)
                request = asking("r1")
                await on.send("requests", request, request.session_id)
                (retrieved,) = await on.until("phases", of("r1", Retrieved))
                await on.until("tokens", tells("r1"))
            assert [hit.passage_id for hit in retrieved.passages] == ["d1#0", "d2#0"]
            assert (retrieved.shards, retrieved.missing, retrieved.took_ms) == (1, (), 2.0)
            async with router(kafka, "router-b"), worker(on, "replica-a", Role.REPLICA, 4):
                (work,) = await on.until("decode", of("r1", Work))
                first, second = await on.until("tokens", tells("r1"), 2)
            context = with_context(request, retrieved)
            assert work.prompt_tokens == context.request.prompt_tokens != request.prompt_tokens
            assert first.retrieved == second.retrieved == (context.notice,)
            assert [search.request_id for search in requests] == ["r1"]
            assert requests[0].text == "when does the ferry leave" and requests[0].k == 2

    run(main())


def test_router_continues_at_once_without_retrieval_pool(kafka: LogSettings) -> None:
    """The notice says `not_ready`; the router does not wait until the search's deadline."""

    async def main() -> None:
        async with (
            stage(kafka) as on,
            worker(on, "replica-a", Role.REPLICA, 4),
            router(kafka),
        ):
            request = asking("r1")
            await on.send("requests", request, request.session_id)
            (work,) = await on.until("decode", of("r1", Work))
            (frame,) = await on.until("tokens", tells("r1"))
            assert work.prompt_tokens == request.prompt_tokens
            assert frame.retrieved[0].error.code == "not_ready"
            assert wall_ms() < request.retrieval.by_ms  # type: ignore[union-attr]  # it asks

    run(main())
