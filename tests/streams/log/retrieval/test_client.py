"""The asker against a pool that is a function: whom it asks, whom again, what it believes."""

import asyncio

import pytest

from schemas.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    NotReady,
    QueueFull,
    WrongDimension,
)
from schemas.records import RetrievalRequest
from streams.log.clock import wall_ms
from streams.log.retrieval import exchange as module
from tests.streams.log.retrieval.pool_stub import Pool, ask, asking, hits
from tests.virtual_time import virtual
from tests.waits import pass_time, until


@virtual
async def test_client_rotates_partitions_and_merges_all_shards() -> None:
    def both(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        pool.answer(hits(request, 1, shards=2, found={"b": 0.5}))
        pool.answer(hits(request, 0, shards=2))

    async with asking(2, both) as (asker, pool):
        for _ in range(5):
            result = await ask(asker)
            assert [hit.document_id for hit in result.hits] == ["b", "a"] and result.is_complete
        assert pool.asked_partitions == [1, 2, 3, 0, 1]


@virtual
async def test_client_retries_farthest_partition_and_avoids_silent_one() -> None:
    """Partitions 0 and 1 belonged to a worker that died."""

    def half(pool: Pool, partition: int, request: RetrievalRequest) -> None:
        if partition >= 2:
            pool.answer(hits(request))

    async with asking(1, half) as (asker, pool):
        for _ in range(6):
            assert (await ask(asker)).is_complete
        assert pool.asked_partitions == [1, 3, 2, 3, 0, 2, 2, 3]


@virtual
async def test_client_leaves_partition_that_falls_silent_later() -> None:
    """The worker died with an active retrieval, just after it had answered a later one."""

    def dying(pool: Pool, partition: int, request: RetrievalRequest) -> None:
        if len(pool.asked_partitions) > 1:
            pool.answer(hits(request))

    async with asking(1, dying) as (asker, pool):
        first = asyncio.create_task(ask(asker, within_ms=2_000))
        await pass_time(0.7)
        for _ in range(4):
            assert (await ask(asker)).is_complete
        assert (await first).is_complete
        assert pool.asked_partitions == [1, 2, 3, 0, 1, 3]


@virtual
async def test_client_does_not_resend_to_slow_shards() -> None:
    def slow(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        asyncio.get_running_loop().call_later(0.5, pool.answer, hits(request))

    async with asking(1, slow) as (asker, pool):
        tasks = []
        for _ in range(60):
            tasks.append(asyncio.create_task(ask(asker, within_ms=1_000)))
            await pass_time(0.01)
        assert all(result.is_complete for result in await asyncio.gather(*tasks))
        resent_ids = [record for record in pool.ids if record.endswith("-2")]
        assert len(resent_ids) < 30, "only those that were asked before the first answer came"


@virtual
async def test_client_resends_when_only_one_shard_answers() -> None:
    def first_shard_silent(pool: Pool, partition: int, request: RetrievalRequest) -> None:
        pool.answer(hits(request, 1, shards=2))
        if partition == 3:
            pool.answer(hits(request, 0, shards=2))

    async with asking(2, first_shard_silent) as (asker, pool):
        assert (await ask(asker)).is_complete
        assert pool.asked_partitions == [1, 3]


@virtual
async def test_client_keeps_first_answer_per_shard_and_drops_late_ones() -> None:
    requests: list[RetrievalRequest] = []

    def twice(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        requests.append(request)
        pool.answer(hits(request, 0, shards=2, found={"first": 1.0}))
        pool.answer(hits(request, 0, shards=2, found={"second": 1.0}))
        pool.answer(hits(request, 0, shards=3, found={"other layout": 0.0}))
        pool.answer(hits(request, 1, shards=2, error=WrongDimension("3").to_wire()))
        pool.answer(hits(request, 1, shards=2, found={"b": 2.0}))

    async with asking(2, twice) as (asker, pool):
        result = await ask(asker)
        assert [hit.document_id for hit in result.hits][0] == "first"
        pool.answer(hits(requests[0], 0, shards=2))
        assert (await ask(asker)).hits[0].document_id == "first"


@virtual
async def test_client_resends_to_other_replica_after_refusal() -> None:
    """The worker of partitions 0 and 1 has no room; the other shard answers late."""
    full = QueueFull("expected fewer").to_wire()

    def half(pool: Pool, partition: int, request: RetrievalRequest) -> None:
        refused = {"error": full, "found": {}} if partition < 2 else {}
        pool.answer(hits(request, 0, shards=2, **refused))
        late = hits(request, 1, shards=2, found={"b": 2.0})
        asyncio.get_running_loop().call_later(0.05, pool.answer, late)

    async with asking(2, half) as (asker, pool):
        result = await ask(asker)
        assert [hit.document_id for hit in result.hits] == ["a", "b"] and result.is_complete
        assert pool.asked_partitions == [1, 3]
        assert (await ask(asker)).is_complete and pool.asked_partitions == [1, 3, 2], (
            "nothing to avoid"
        )


@virtual
async def test_client_raises_refusal_of_all_replicas() -> None:
    def none(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        pool.answer(hits(request, error=QueueFull("expected fewer").to_wire(), found={}))

    def once(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        if len(pool.asked_partitions) == 1:
            none(pool, _partition, request)

    for answers in (none, once):
        async with asking(1, answers) as (asker, pool):
            with pytest.raises(QueueFull, match="expected fewer"):
                await ask(asker)
            assert pool.asked_partitions == [1, 3]


@virtual
async def test_client_resends_to_replacement_shards_after_layout_change() -> None:
    """The layout changes before the retrieval was resent, or after a refusal and a resend."""
    full = QueueFull("expected fewer").to_wire()

    def silent(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        if len(pool.asked_partitions) == 1 + refused:
            pool.join(2)
        elif len(pool.asked_partitions) == 2 + refused:
            pool.answer(hits(request, found={"of the old shard": 0.0}))
            pool.answer(hits(request, 0, shards=2))
            pool.answer(hits(request, 1, shards=2, found={"b": 0.5}))
        else:
            pool.answer(hits(request, error=full, found={}))

    for refused in (0, 1):
        async with asking(1, silent) as (asker, pool):
            result = await ask(asker)
            assert [hit.document_id for hit in result.hits] == ["b", "a"]
            assert result.shards == 2 and result.is_complete
            assert pool.asked_partitions == [1, 3, 1][: 2 + refused]
            assert (asker._exchange._pending, asker._exchange._direct._avoided_ms) == ({}, {})


@virtual
async def test_client_does_not_resend_when_new_shards_join() -> None:
    def late(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        pool.join(2)
        asyncio.get_running_loop().call_later(0.1, pool.answer, hits(request))

    async with asking(1, late) as (asker, pool):
        result = await ask(asker)
        assert result.shards == 1 and result.is_complete and pool.asked_partitions == [1]


@virtual
async def test_client_stops_at_deadline_and_names_silent_shards() -> None:
    def half(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        pool.answer(hits(request, 0, shards=2))

    async with asking(2, half) as (asker, pool):
        began_ms = wall_ms()
        result = await ask(asker, within_ms=60)
        assert wall_ms() - began_ms <= 60
        assert set(result.missing) == {1} and len(pool.asked_partitions) == 2
        assert asker._exchange._pending == {}
    async with asking(1, lambda *_: None) as (asker, pool):
        with pytest.raises(DeadlineExceeded):
            await ask(asker, within_ms=40)
        assert wall_ms() - began_ms <= 60 + 40
        with pytest.raises(DeadlineExceeded, match="passed 7 ms ago"):
            await ask(asker, within_ms=-7)
        assert asker._exchange._pending == {}


@virtual
async def test_client_rejects_impossible_retrieval_immediately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with asking(0, lambda *_: None) as (asker, pool):
        with pytest.raises(NotReady, match="no retrieval worker is ready"):
            await ask(asker)
    async with asking(1, lambda *_: None) as (asker, pool):
        with pytest.raises(InvalidRequest, match="at most 4096 seeds, found 5000"):
            await asker.search([1], collection="c", deadline_ms=0, seeds=["s"] * 5_000)
        monkeypatch.setattr(module, "PENDING_MAX", 1)
        first = asyncio.create_task(ask(asker, within_ms=100))
        await until(lambda: len(pool.asked_partitions) == 1)
        with pytest.raises(QueueFull, match="1 retrievals are under way"):
            await ask(asker)
        with pytest.raises(DeadlineExceeded):
            await first
        pool.valid = False
        with pytest.raises(BrokerUnavailable, match="hits would not arrive"):
            await ask(asker)
