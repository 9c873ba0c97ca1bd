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
from schemas.log.clock import wall_ms
from schemas.log.retrieval import exchange as module
from schemas.records import RetrievalRequest
from tests.schemas.log.retrieval.asked_pool import Pool, ask, asking, hits
from tests.virtual import virtual
from tests.waiting import pass_time, until


@virtual
async def test_partitions_take_turns_and_all_shards_are_merged() -> None:
    def both(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        pool.answer(hits(request, 1, shards=2, found={"b": 0.5}))
        pool.answer(hits(request, 0, shards=2))

    async with asking(2, both) as (asker, pool):
        for _ in range(5):
            found = await ask(asker)
            assert [hit.document_id for hit in found.hits] == ["b", "a"] and found.is_complete
        assert pool.asked == [1, 2, 3, 0, 1]


@virtual
async def test_a_silent_partition_is_left_for_the_one_farthest_away_and_then_avoided() -> None:
    """Partitions 0 and 1 were those of a worker that died."""

    def half(pool: Pool, partition: int, request: RetrievalRequest) -> None:
        if partition >= 2:
            pool.answer(hits(request))

    async with asking(1, half) as (asker, pool):
        for _ in range(6):
            assert (await ask(asker)).is_complete
        assert pool.asked == [1, 3, 2, 3, 0, 2, 2, 3]


@virtual
async def test_a_partition_that_falls_silent_only_later_is_left_as_well() -> None:
    """Its worker died with a retrieval in hand, just after it had answered a later one."""

    def dying(pool: Pool, partition: int, request: RetrievalRequest) -> None:
        if len(pool.asked) > 1:
            pool.answer(hits(request))

    async with asking(1, dying) as (asker, pool):
        first = asyncio.create_task(ask(asker, within_ms=2_000))
        await pass_time(0.7)
        for _ in range(4):
            assert (await ask(asker)).is_complete
        assert (await first).is_complete
        assert pool.asked == [1, 2, 3, 0, 1, 3]


@virtual
async def test_shards_that_are_only_slow_are_not_asked_again() -> None:
    def slow(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        asyncio.get_running_loop().call_later(0.5, pool.answer, hits(request))

    async with asking(1, slow) as (asker, pool):
        tasks = []
        for _ in range(60):
            tasks.append(asyncio.create_task(ask(asker, within_ms=1_000)))
            await pass_time(0.01)
        assert all(found.is_complete for found in await asyncio.gather(*tasks))
        again = [record for record in pool.ids if record.endswith("-2")]
        assert len(again) < 30, "only those that were asked before the first answer came"


@virtual
async def test_one_shard_may_be_silent_where_another_answers() -> None:
    def one(pool: Pool, partition: int, request: RetrievalRequest) -> None:
        pool.answer(hits(request, 1, shards=2))
        if partition == 3:
            pool.answer(hits(request, 0, shards=2))

    async with asking(2, one) as (asker, pool):
        assert (await ask(asker)).is_complete
        assert pool.asked == [1, 3]


@virtual
async def test_the_first_answer_of_a_shard_counts_and_late_ones_are_dropped() -> None:
    kept: list[RetrievalRequest] = []

    def twice(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        kept.append(request)
        pool.answer(hits(request, 0, shards=2, found={"first": 1.0}))
        pool.answer(hits(request, 0, shards=2, found={"second": 1.0}))
        pool.answer(hits(request, 0, shards=3, found={"other layout": 0.0}))
        pool.answer(hits(request, 1, shards=2, error=WrongDimension("3").to_wire()))
        pool.answer(hits(request, 1, shards=2, found={"b": 2.0}))

    async with asking(2, twice) as (asker, pool):
        found = await ask(asker)
        assert [hit.document_id for hit in found.hits][0] == "first"
        pool.answer(hits(kept[0], 0, shards=2))
        assert (await ask(asker)).hits[0].document_id == "first"


@virtual
async def test_a_replica_that_refuses_is_left_for_another_at_once() -> None:
    """Whoever has partitions 0 and 1 has no room; the other shard answers late."""
    full = QueueFull("expected fewer").to_wire()

    def half(pool: Pool, partition: int, request: RetrievalRequest) -> None:
        refused = {"error": full, "found": {}} if partition < 2 else {}
        pool.answer(hits(request, 0, shards=2, **refused))
        late = hits(request, 1, shards=2, found={"b": 2.0})
        asyncio.get_running_loop().call_later(0.05, pool.answer, late)

    async with asking(2, half) as (asker, pool):
        found = await ask(asker)
        assert [hit.document_id for hit in found.hits] == ["a", "b"] and found.is_complete
        assert pool.asked == [1, 3]
        assert (await ask(asker)).is_complete and pool.asked == [1, 3, 2], "nothing to avoid"


@virtual
async def test_what_all_replicas_refuse_is_refused() -> None:
    def none(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        pool.answer(hits(request, error=QueueFull("expected fewer").to_wire(), found={}))

    def once(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        if len(pool.asked) == 1:
            none(pool, _partition, request)

    for answers in (none, once):
        async with asking(1, answers) as (asker, pool):
            with pytest.raises(QueueFull, match="expected fewer"):
                await ask(asker)
            assert pool.asked == [1, 3]


@virtual
async def test_a_retrieval_whose_shards_have_left_is_asked_of_those_that_replace_them() -> None:
    """Before it was sent again, and after: the first replica refused, and the other one left."""
    full = QueueFull("expected fewer").to_wire()

    def silent(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        if len(pool.asked) == 1 + refused:
            pool.join(2)
        elif len(pool.asked) == 2 + refused:
            pool.answer(hits(request, found={"of the old shard": 0.0}))
            pool.answer(hits(request, 0, shards=2))
            pool.answer(hits(request, 1, shards=2, found={"b": 0.5}))
        else:
            pool.answer(hits(request, error=full, found={}))

    for refused in (0, 1):
        async with asking(1, silent) as (asker, pool):
            found = await ask(asker)
            assert [hit.document_id for hit in found.hits] == ["b", "a"]
            assert found.shards == 2 and found.is_complete
            assert pool.asked == [1, 3, 1][: 2 + refused]
            assert (asker._exchange._pending, asker._exchange._direct._avoided_ms) == ({}, {})


@virtual
async def test_shards_that_join_do_not_hurry_those_that_answer() -> None:
    def late(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        pool.join(2)
        asyncio.get_running_loop().call_later(0.1, pool.answer, hits(request))

    async with asking(1, late) as (asker, pool):
        found = await ask(asker)
        assert found.shards == 1 and found.is_complete and pool.asked == [1]


@virtual
async def test_nobody_waits_beyond_the_deadline_and_silent_shards_are_named() -> None:
    def half(pool: Pool, _partition: int, request: RetrievalRequest) -> None:
        pool.answer(hits(request, 0, shards=2))

    async with asking(2, half) as (asker, pool):
        began_ms = wall_ms()
        found = await ask(asker, within_ms=60)
        assert wall_ms() - began_ms <= 60
        assert set(found.missing) == {1} and len(pool.asked) == 2
        assert asker._exchange._pending == {}
    async with asking(1, lambda *_: None) as (asker, pool):
        with pytest.raises(DeadlineExceeded):
            await ask(asker, within_ms=40)
        assert wall_ms() - began_ms <= 60 + 40
        with pytest.raises(DeadlineExceeded, match="passed 7 ms ago"):
            await ask(asker, within_ms=-7)
        assert asker._exchange._pending == {}


@virtual
async def test_what_cannot_be_asked_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asking(0, lambda *_: None) as (asker, pool):
        with pytest.raises(NotReady, match="no retrieval worker is ready"):
            await ask(asker)
    async with asking(1, lambda *_: None) as (asker, pool):
        with pytest.raises(InvalidRequest, match="at most 4096 seeds, found 5000"):
            await asker.search([1], collection="c", deadline_ms=0, seeds=["s"] * 5_000)
        monkeypatch.setattr(module, "PENDING_MAX", 1)
        first = asyncio.create_task(ask(asker, within_ms=100))
        await until(lambda: len(pool.asked) == 1)
        with pytest.raises(QueueFull, match="1 retrievals are under way"):
            await ask(asker)
        with pytest.raises(DeadlineExceeded):
            await first
        pool.valid = False
        with pytest.raises(BrokerUnavailable, match="hits would not arrive"):
            await ask(asker)
