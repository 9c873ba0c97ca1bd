"""Shards and replicas on a real broker: workers die, join, leave and are replaced."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from schemas.errors import TriviumError
from schemas.records import MemberState
from schemas.settings import LogSettings
from streams.log.clock import wall_ms
from streams.log.retrieval.results import RetrievalResult, partitions_at
from tests.waits import PATIENCE_S, pause, until
from tests.workers.retrieval.retrieval_workers import (
    Library,
    calm,
    library,
    process,
    ready,
    wait_for_documents,
    worker,
)
from tests.workers.vector.data import gaussian, nearest
from workers.retrieval.intake import group_id
from workers.retrieval.settings import ShardPlace
from workers.retrieval.worker import RetrievalWorker

pytestmark = pytest.mark.kafka
DIM = 8


@pytest.fixture(autouse=True)
async def calm_members() -> AsyncIterator[None]:
    async with calm():
        yield


async def test_retrieval_is_answered_while_replica_dies(
    kafka_with: Callable[..., Awaitable[LogSettings]],
) -> None:
    """Half of a shard's partitions are silent until its group notices, ten seconds later."""
    kafka = await kafka_with(retrieval_partitions=4)
    count, within_ms = 120, int(PATIENCE_S * 1000)
    vectors = gaussian(300, DIM)
    queries = gaussian(count, DIM, seed=1)
    truth = nearest(vectors, queries, 3)
    with process(kafka, "victim", "0/2") as victim:
        async with (
            library(kafka) as books,
            worker(kafka, "left", "0/2") as left_worker,
            worker(kafka, "right-a", "1/2") as right_a,
            worker(kafka, "right-b", "1/2") as right_b,
        ):
            await ready(books, 2)
            view = books.asker.membership.view
            await until(lambda: "victim" in view.members)
            await until(lambda: view.members["victim"].state is MemberState.READY)
            await books.put({f"d{i}": row for i, row in enumerate(vectors)})

            def holds(name: str) -> int:
                load = view.members[name].search
                return sum(collection.documents for collection in load.collections) if load else 0

            names = ("victim", "left", "right-a", "right-b")
            await until(lambda: sum(map(holds, names)) == 2 * len(vectors))
            outcomes: list[RetrievalResult | TriviumError] = []

            async def ask(number: int) -> None:
                try:
                    outcomes.append(await books.search(queries[number], within_ms=within_ms))
                except TriviumError as error:
                    outcomes.append(error)
                    return
                hits = [hit.document_id for hit in outcomes[-1].hits]  # type: ignore[union-attr]
                if outcomes[-1].is_complete:  # type: ignore[union-attr]
                    assert hits == [f"d{row}" for row in truth[number]]

            async with asyncio.TaskGroup() as asking_all:
                for number in range(count):
                    asking_all.create_task(ask(number))
                    await pause(0.02)
                    if number == count // 4:
                        victim.kill()
            assert len(outcomes) == count
            wrong = [
                outcome
                for outcome in outcomes
                if not (isinstance(outcome, RetrievalResult) and outcome.is_complete)
            ]
            assert not wrong, "the others stand in for the dead one"
            for replica in (left_worker, right_a, right_b):
                assert replica.responder.tallies.searches > 0


class Reader:
    """Asks for one document after the other, and finds just that."""

    def __init__(self, books: Library, vectors: Mapping[str, Any]) -> None:
        self.answered = 0
        self._books, self._vectors = books, vectors
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            for name, vector in self._vectors.items():
                result = await self._books.search(vector, k=1)
                assert [hit.document_id for hit in result.hits] == [name] and result.is_complete
                self.answered += 1

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait, and see that all is answered meanwhile."""
        await until(lambda: condition() or self._reading.done())
        assert not self._reading.done(), self._reading.exception()

    async def wait_for_answers(self, count: int) -> None:
        """Wait for so many more answers."""
        before = self.answered
        await self.until(lambda: self.answered >= before + count)

    async def stop(self) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])


async def test_replicas_join_leave_and_are_replaced_during_retrievals(
    kafka: LogSettings,
) -> None:
    vectors = {f"d{i}": row for i, row in enumerate(gaussian(50, DIM))}
    async with library(kafka) as books, AsyncExitStack() as first:
        first_worker = await first.enter_async_context(worker(kafka, "one"))
        reader = await served_by(first_worker, books, vectors)
        async with worker(kafka, "two") as second_worker:
            await reader.until(lambda: second_worker.responder.tallies.searches > 20)
            owned = [replica._intake.group for replica in (first_worker, second_worker)]
            await reader.until(
                lambda: [len(group.owned) for group in owned] == [2, 2]
            )  # two topics
            await first.aclose()
            assert first_worker.membership.state is MemberState.GONE
            assert await members(kafka) == ["two"], "the group need not wait for one that left"
            async with worker(kafka, "three") as third_worker:
                await reader.until(lambda: third_worker.responder.tallies.searches > 20)
                await reader.wait_for_answers(100)
                await wait_for_load_report(books, third_worker)
                await reader.stop()


async def test_shard_count_changes_during_retrievals(kafka: LogSettings) -> None:
    vectors = {f"d{i}": row for i, row in enumerate(gaussian(50, DIM))}
    async with library(kafka) as books, AsyncExitStack() as before:
        whole = await before.enter_async_context(worker(kafka, "whole"))
        reader = await served_by(whole, books, vectors)
        async with (
            worker(kafka, "half-0", "0/2") as first_half,
            worker(kafka, "half-1", "1/2") as second_half,
        ):
            await ready(books, 2)
            await reader.wait_for_answers(
                2
            )  # what was asked of the whole is answered: nobody else would
            await before.aclose()
            served = [replica.responder.tallies.searches for replica in (first_half, second_half)]
            await reader.wait_for_answers(100)
            assert first_half.responder.tallies.searches >= served[0] + 99
            assert second_half.responder.tallies.searches >= served[1] + 99
            held_by = [
                sum(s.documents for s in replica.collections.states())
                for replica in (first_half, second_half)
            ]
            assert 0 < held_by[0] < 50 and sum(held_by) == 50
            await reader.stop()


async def served_by(only: RetrievalWorker, books: Library, vectors: dict[str, Any]) -> Reader:
    """A reader with its first answers, once the only worker holds all documents."""
    await ready(books, 1)
    await books.put(vectors)
    await wait_for_documents(only, len(vectors))
    reader = Reader(books, vectors)
    await reader.wait_for_answers(20)
    return reader


async def members(log: LogSettings, place: str = "0/1") -> list[str]:
    """Whom the broker counts to the group of a shard."""
    admin = AIOKafkaAdminClient(bootstrap_servers=log.bootstrap)
    await admin.start()
    try:
        group = group_id(log, ShardPlace.parse(place))
        (described,) = await admin.describe_consumer_groups([group])
    finally:
        await admin.close()
    ((_, _, _, _, _, group_members, *_),) = described.groups
    return sorted(client_id for _, client_id, *_ in group_members)


async def wait_for_load_report(books: Library, running: RetrievalWorker) -> None:
    """Wait until the fleet has heard how a worker does."""
    members = books.asker.membership.view.members

    def is_reported() -> bool:
        load = members[running.membership.member_id].search
        return (
            load is not None
            and load.searches_total > 20
            and load.ms_per_extend > 0
            and load.decode_wait_ms_p95 >= load.decode_wait_ms_p50 >= 0
            and 0 <= load.occupancy <= 1
            and (load.waiting_prefill, load.parked) == (0, 0)
            and [collection.documents for collection in load.collections] == [50]
        )

    await until(is_reported)


async def test_search_prefers_replica_in_place_of_client(
    kafka_with: Callable[..., Awaitable[LogSettings]],
) -> None:
    """A replica elsewhere answers while there is none."""
    kafka = await kafka_with(retrieval_partitions=4)
    here, there = (replace(kafka, place=place) for place in ("here", "there"))
    vectors = gaussian(40, DIM)
    async with library(here) as books, worker(there, "far") as far:
        await ready(books, 1)
        await books.put({f"d{i}": row for i, row in enumerate(vectors)})
        await wait_for_documents(far, len(vectors))
        view = books.asker.membership.view
        async with worker(here, "near") as near:
            await wait_for_documents(near, len(vectors))
            await until(lambda: len(partitions_at(view, "here", wall_ms())) == 2)
            before = far.responder.tallies.searches
            for vector in vectors[:6]:
                await books.search(vector)
            assert near.responder.tallies.searches == 6
            assert far.responder.tallies.searches == before
        await until(lambda: not partitions_at(view, "here", wall_ms()))
        assert await books.ids(vectors[3], k=1) == ["d3"]
        assert far.responder.tallies.searches == before + 1
