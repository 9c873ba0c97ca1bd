"""The retrieval pool follows its load: a copy starts under searches, takes its share, leaves."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from infra.scaling.settings import ScalingSettings
from infra.stack.launcher import Stack
from schemas.records import SearchLoad
from schemas.settings import LogSettings
from tests.e2e.harness import sim_settings, stack
from tests.e2e.scaling.autoscaled_stack import metric, scaled, serves
from tests.waits import START_S, pause, until
from tests.workers.retrieval.retrieval_workers import Library, library, ready
from tests.workers.vector.data import gaussian
from workers.retrieval.settings import RetrievalSettings

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(1_800)]
ROWS, DIM = 2_000, 32
# One lane, so that a worker holds four searches at once; both copies have one folder of snapshots.
SCALING = ScalingSettings(up_after_ms=1_000, down_after_ms=8_000, workers_max=1, copies_max=2)
ASKERS, SHARE = 64, 50


class Askers:
    """Search again and again for documents that there are, until they are told to stop."""

    def __init__(self, books: Library, count: int, *, pause_s: float = 0.0) -> None:
        self.answered = 0
        self._pause_s = pause_s
        self._books, self._vectors = books, gaussian(ROWS, DIM)
        self._stopped = asyncio.Event()
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(count)]

    async def _ask(self, number: int) -> None:
        while not self._stopped.is_set():
            number = (number + ASKERS) % ROWS
            result = await self._books.search(self._vectors[number], k=1)
            assert result.is_complete and [hit.document_id for hit in result.hits] == [f"d{number}"]
            self.answered += 1
            await pause(self._pause_s)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for it, or for the first search that fails."""
        await until(
            lambda: condition() or any(task.done() for task in self._tasks), seconds=START_S
        )
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        self._stopped.set()
        await asyncio.gather(*self._tasks)


def searchers(running: Stack) -> dict[str, SearchLoad]:
    """What retrieval workers that serve are doing."""
    assert running.fleet is not None
    members = running.fleet.view.members.values()
    return {
        member.member_id: member.search for member in members if member.search and serves(member)
    }


def count_documents(running: Stack) -> int:
    loads = searchers(running).values()
    return sum(collection.documents for load in loads for collection in load.collections)


async def test_retrieval_copy_starts_and_leaves_with_load(
    kafka: LogSettings, tmp_path: Path
) -> None:
    retrieval = RetrievalSettings(
        lanes=1,
        metrics=("books=sqeuclidean",),
        snapshot_folder=str(tmp_path / "snapshots"),
        shares_snapshots=True,
        snapshot_interval_s=1,
    )
    settings = replace(sim_settings(kafka), scaling=SCALING, retrieval=retrieval)
    async with (
        stack(settings, tmp_path / "home", replica=1, retrieval=1) as running,
        library(kafka) as books,
    ):
        await ready(books, 1)
        await books.put({f"d{row}": vector for row, vector in enumerate(gaussian(ROWS, DIM))})
        await until(lambda: count_documents(running) == ROWS, seconds=START_S)
        async with scaled(running):
            await follows(running, books)
        (worker_id,) = searchers(running)
        assert worker_id == "retrieval-0" and running.plan.retrieval == 1


async def follows(running: Stack, books: Library) -> None:
    """Under load there are two, and each answers; without it one is left, and answers."""
    first = running.processes["retrieval-0"].pid
    askers = Askers(books, ASKERS)
    await askers.until(lambda: len(searchers(running)) == 2)
    assert await metric(running.gateway_urls[0], "retrieval") == 2

    def shared() -> bool:
        loads = searchers(running)
        return len(loads) == 2 and all(load.searches_total > SHARE for load in loads.values())

    await askers.until(shared)
    await askers.stop()
    few = Askers(books, 1, pause_s=0.05)  # all through the leave of the copy
    await few.until(lambda: "retrieval-1" not in running.processes)
    before = few.answered
    await few.until(lambda: few.answered > before + SHARE)
    await few.stop()
    assert running.processes["retrieval-0"].pid == first
    assert not any(process.restarts for process in running.processes.values())
