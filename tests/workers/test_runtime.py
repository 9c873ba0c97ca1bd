"""A worker's lives: with which engine, in which epoch, and what ends them."""

import asyncio
from dataclasses import replace
from typing import cast

from schemas.errors import (
    BrokerUnavailable,
    ConfigError,
    LeaseError,
    NameTaken,
)
from schemas.records import (
    Outcome,
    TokenFrame,
)
from tests.virtual_time import virtual
from tests.waits import until
from tests.workers.fakes import (
    FakeKvEngine,
    out,
    work,
)
from tests.workers.running_worker import RunningWorker, running_worker
from workers.llm.engine import Engine
from workers.llm.probing.triggers import installed_triggers


async def test_worker_joins_after_engine_start() -> None:
    worker, starts, may_start = RunningWorker(), asyncio.Event(), asyncio.Event()

    async def start(epoch: int) -> Engine:
        assert epoch == worker.membership.epoch
        starts.set()
        await may_start.wait()
        return worker.engine

    await worker.start(start)
    await starts.wait()
    assert worker.membership.met
    assert not worker.membership.beats  # a start that takes long cannot lose a lease
    assert not worker.log.readers
    may_start.set()
    await worker.ready()
    await until(lambda: len(worker.membership.beats) > 1)
    published = worker.membership.published
    assert published == replace(worker.engine.capability, triggers=tuple(installed_triggers()))
    assert (worker.log.readers["prefill"].partition, worker.decode.partition) == (1, 2)
    assert worker.decode.started_at == "latest"
    worker.stop.set()
    assert await worker.wait_for_exit() is None
    assert worker.engine.closed


async def test_worker_ends_when_engine_start_fails() -> None:
    worker = RunningWorker()

    async def start(epoch: int) -> Engine:
        raise ConfigError("no such model")

    await worker.start(start)
    assert isinstance(await worker.wait_for_exit(), ConfigError)
    assert worker.membership.has_left


async def test_worker_stops_during_engine_start() -> None:
    worker, starts = RunningWorker(), asyncio.Event()

    async def start(epoch: int) -> Engine:
        starts.set()
        await asyncio.Event().wait()
        raise AssertionError

    await worker.start(start)
    await starts.wait()
    worker.stop.set()
    assert await worker.wait_for_exit() is None
    assert worker.membership.has_left


@virtual
async def test_worker_waits_for_free_partition_with_running_engine() -> None:
    """The cause is outside the worker, so it never gives up."""
    worker = RunningWorker()
    worker.log.full.add("decode")
    await worker.start()
    await until(lambda: len(worker.memberships) > 1)
    assert not worker.engine.closed
    worker.log.full.clear()
    await worker.ready()
    worker.stop.set()
    assert await worker.wait_for_exit() is None
    assert worker.engine.closed


@virtual
async def test_worker_waits_for_broker_before_engine_start() -> None:
    worker, started = RunningWorker(), list[int]()

    async def start(epoch: int) -> Engine:
        started.append(epoch)
        return cast(Engine, worker.engine)

    worker.log.meetings += [BrokerUnavailable("not there yet"), BrokerUnavailable("not yet")]
    await worker.start(start)
    await worker.ready()
    assert started == [worker.membership.epoch]
    worker.stop.set()
    assert await worker.wait_for_exit() is None


@virtual
async def test_worker_serves_in_new_epoch_after_lease_loss() -> None:
    """It drops its active requests without a report."""
    async with running_worker(exchanges_kv=True) as worker:
        first, engine = worker.membership, worker.engine
        assert isinstance(engine, FakeKvEngine)
        await worker.submit(work(), work("r2"))
        first.valid = False
        worker.engine.say(out(ids=[5], text="a", finish_reason="stop"), out("r2.1", [6], "b"))
        first.lease_loss.set()
        await worker.lives(2)
        second = worker.membership
        assert second is not first and second.epoch > first.epoch
        assert engine.lives == [second.epoch]
        assert worker.log.sends == []
        assert (worker.engine.aborted, worker.engine.closed) == (["r2.1"], False)
        await worker.submit(replace(work("r3"), worker_epoch=second.epoch))
        worker.engine.say(out("r2.1", [7], "c"), out("r3.1", [5], "a", finish_reason="stop"))
        await until(lambda: worker.log.of(Outcome) != [])
        assert [o.request_id for o in worker.log.of(Outcome)] == ["r3"]
        assert {r for frame in worker.log.of(TokenFrame) for r in frame.request_ids} == {"r3"}


@virtual
async def test_worker_discards_buffered_records_after_lease_loss() -> None:
    """Otherwise they would be flushed later; a drained worker sends them."""
    async with running_worker() as worker:
        worker.membership.lease_loss.set()
        await worker.lives(2)
        assert sorted(worker.log.closed) == [("durable", "discarded"), ("tokens", "discarded")]
        worker.log.closed.clear()
        worker.stop.set()
        assert await worker.wait_for_exit() is None
        assert sorted(worker.log.closed) == [("durable", "sent"), ("tokens", "sent")]


@virtual
async def test_worker_survives_broker_outage() -> None:
    """Each try fails at another place, and the engine stays up."""
    async with running_worker() as worker:
        troubles = (BrokerUnavailable("away"), TimeoutError(), LeaseError("no partition is free"))
        for number, trouble in enumerate(troubles, start=2):
            worker.meetings.append(trouble)
            worker.membership.lease_loss.set()
            await worker.lives(number)
        assert worker.meetings == []
        assert not worker.engine.closed


async def test_worker_ends_when_name_is_taken() -> None:
    async with running_worker() as worker:
        worker.meetings.append(NameTaken("another process took its place"))
        worker.membership.lease_loss.set()
        assert isinstance(await worker.wait_for_exit(), NameTaken)
        assert worker.engine.closed
