"""How long closing takes where the log is away, or where a cancellation is lost."""

import asyncio
import logging
from typing import Any

import pytest
from aiokafka.errors import KafkaError

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable
from schemas.records import MemberKind
from schemas.settings import LogSettings
from streams.log.cancellation import RECANCEL_S, cancel_and_wait, run_within
from streams.log.clients import AssignedReader, LogProducer
from streams.log.connecting import (
    CLOSE_S,
    START_S,
    abort_producer,
    close_producer,
    start_client,
    stop_consumer,
)
from streams.log.membership import Membership
from streams.log.retry import run_with_reconnect
from streams.log.transactions import OutgoingRecord, Transactions
from tests.virtual_time import virtual


class Away:
    """A consumer whose last positions nobody takes: aiokafka offers them for ever."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self._fetcher = self._client = self
        self._coordinator: Any = None

    async def stop(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed.append("closed")


class Deaf(Away):
    """One that loses its first cancellation, as aiokafka's own tasks do, and then waits again."""

    async def stop(self) -> None:
        await deaf_to(1)


async def deaf_to(cancellations: int) -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancellations -= 1
            if cancellations < 0:
                raise


async def taking(seconds: float) -> None:
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=seconds)


async def closing_of(task: "asyncio.Task[None]") -> None:
    await task


@virtual
async def test_reader_closes_soon_despite_long_request_timeout() -> None:
    """With a 30 s request timeout, workers were once away for 30 s after a leader change."""
    settings = LogSettings(request_timeout_ms=30_000)
    reader = AssignedReader(settings, "decode", [0], client_id="r", committed_group="decode")
    away: Any = Away()
    reader._consumer = away
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await reader.stop()
    assert loop.time() - began_s <= 2.5
    assert away.closed == ["closed", "closed"]


@virtual
async def test_consumer_closes_after_lost_cancellation() -> None:
    """A router whose consumer lost it after an outage never rejoined."""
    deaf: Any = Deaf()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await stop_consumer(deaf)
    assert loop.time() - began_s <= CLOSE_S + 2 * RECANCEL_S + 0.1
    assert deaf.closed == ["closed", "closed"]


@virtual
async def test_consumer_close_ends_tasks_of_its_group() -> None:
    """Otherwise they would send heartbeats for ever for a member that has left."""
    away: Any = Away()
    away._coordinator = group = Away()
    beating: Any = asyncio.create_task(deaf_to(1))
    group._heartbeat_task = beating  # type: ignore[attr-defined]  # aiokafka's name
    await stop_consumer(away)
    assert beating.done()


class Offering:
    """A producer whose records nobody takes, and whose parts do not close either."""

    def __init__(self, error: type[Exception] = KafkaError) -> None:
        self.close_calls: list[str] = []
        self._sender = Part(self.close_calls, "sender", error)
        self.client = Part(self.close_calls, "client", error)

    async def stop(self) -> None:
        await asyncio.Event().wait()


class Part:
    def __init__(self, close_calls: list[str], name: str, error: type[Exception]) -> None:
        self.close_calls, self.name, self.error = close_calls, name, error

    async def close(self) -> None:
        self.close_calls.append(self.name)
        raise self.error(self.name)


@virtual
async def test_producer_closes_every_part_despite_errors() -> None:
    offering: Any = Offering()
    with pytest.raises(KafkaError):
        await close_producer(offering, 1.0)
    assert offering.close_calls == ["sender", "client"]


@virtual
async def test_producer_closes_every_part_after_cancelled_flush() -> None:
    offering: Any = Offering()
    task = asyncio.create_task(close_producer(offering, 5.0))
    await taking(1.0)
    await cancel_and_wait(task)
    assert task.cancelled()
    assert offering.close_calls == ["sender", "client"]


class Follower:
    """Stands for the reader of the fleet topic."""

    stopped = False

    async def stop(self) -> None:
        self.stopped = True


@virtual
async def test_member_stops_reader_after_cancelled_leave() -> None:
    member = Membership(
        LogSettings(),
        Codec(),
        LogProducer(LogSettings(), Codec(), durable=True, client_id="m"),
        member_id="m",
        kind=MemberKind.ASKER,
    )
    follower: Any = Follower()
    member._reader = follower
    member.epoch = 1
    beats: Any = asyncio.Event().wait
    member.beat_now = beats  # type: ignore[method-assign]  # a broker that says nothing
    member.is_valid = lambda: True  # type: ignore[method-assign]
    leaving = asyncio.create_task(member.leave())
    await taking(0.5)
    await cancel_and_wait(leaving)
    assert leaving.cancelled() and follower.stopped


class Silent:
    """A transactional producer whose broker answers nothing any more."""

    def __init__(self) -> None:
        self._txn_manager = self
        self.aborts = 0

    def is_fatal_error(self) -> bool:
        return False

    async def begin_transaction(self) -> None:
        """Asks nobody."""

    async def send(self, *_: Any, **__: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    async def abort_transaction(self) -> None:
        self.aborts += 1
        await asyncio.Event().wait()


@virtual
async def test_unanswered_commit_ends_in_bounded_time() -> None:
    """aiokafka's own context waits for the abort for ever."""
    sending = OutgoingRecord(topic="usage", partition=0, key=None, value=b"")
    writer = Transactions(LogSettings(), "t")
    silent: Any = Silent()
    writer._producer = silent
    writer._voided = {("usage", 0)}
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with pytest.raises(BrokerUnavailable, match="not committed"):
        await writer.commit([sending])
    assert loop.time() - began_s <= writer._limit_ms / 1000 + CLOSE_S + 2 * RECANCEL_S
    task, began_s = asyncio.create_task(writer.commit([sending])), loop.time()
    await taking(0.1)
    await cancel_and_wait(task)
    assert loop.time() - began_s <= CLOSE_S + 2 * RECANCEL_S + 0.2
    assert silent.aborts == 2


@virtual
async def test_client_that_never_starts_stops_in_bounded_time() -> None:
    """A transactional producer asks for its id until a broker answers."""
    stopped_at_s = list[float]()
    loop = asyncio.get_running_loop()

    async def start() -> None:
        await asyncio.Event().wait()

    async def stop() -> None:
        stopped_at_s.append(loop.time())

    began_s = loop.time()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10.0):
            await start_client(start, stop)
    assert stopped_at_s[0] - began_s <= 10.0 + START_S + 0.1


@virtual
async def test_client_stops_after_repeatedly_cancelled_start() -> None:
    """Otherwise a producer would start later and fence the present owner of its id."""
    events = list[str]()

    async def start() -> None:
        await taking(5.0)
        events.append("started")

    async def stop() -> None:
        events.append("stopped")

    task = asyncio.create_task(start_client(start, stop))
    await taking(0.5)
    await cancel_and_wait(task)
    assert task.cancelled()
    assert events == ["started", "stopped"]


@virtual
async def test_discarded_producer_closes_sender_despite_client_error() -> None:
    offering: Any = Offering()
    producer = LogProducer(LogSettings(), Codec(), durable=True, client_id="p")
    producer._producer = offering
    with pytest.raises(KafkaError, match="client"):
        await producer.discard()
    assert offering.close_calls == ["client", "sender"]


@virtual
async def test_reconnect_loop_continues_after_error_in_client_close() -> None:
    """uvloop's RuntimeError for a write to a closed connection once ended a router."""
    offering: Any = Offering(RuntimeError)
    lives, stop = list[str](), asyncio.Event()

    async def life() -> None:
        lives.append("begun")
        if len(lives) == 1:
            await abort_producer(offering)

    await run_with_reconnect("router-0", life, stop)
    assert lives == ["begun", "begun"]
    assert offering.close_calls == ["client", "sender"]


@virtual
async def test_cancel_and_wait_repeats_cancellation_until_tasks_end() -> None:
    tasks = [asyncio.create_task(deaf_to(count)) for count in (0, 1, 3)]
    await asyncio.sleep(0)
    await cancel_and_wait(*tasks)
    assert all(task.cancelled() for task in tasks)


@virtual
async def test_cancel_and_wait_abandons_endless_task_with_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    deaf = asyncio.create_task(deaf_to(1_000), name="deaf")
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with caplog.at_level(logging.WARNING):
        await cancel_and_wait(deaf, within_s=5.0)
    assert loop.time() - began_s == pytest.approx(5.0, abs=0.1)
    assert "left behind" in caplog.text
    assert "deaf" in caplog.text
    while not deaf.done():
        deaf.cancel()
        await asyncio.sleep(0)


@virtual
async def test_cancel_and_wait_raises_no_error_of_tasks() -> None:
    async def fails() -> None:
        raise ValueError

    failing = asyncio.create_task(fails())
    await asyncio.sleep(0)
    await cancel_and_wait(failing)
    assert isinstance(failing.exception(), ValueError)


@virtual
async def test_run_within_returns_whether_closing_finished_in_time() -> None:
    assert await run_within(2.0, taking(1.0))
    assert not await run_within(1.0, taking(2.0))
    assert not await run_within(1.0, deaf_to(1))


@virtual
async def test_run_within_raises_error_of_closing() -> None:
    async def fails() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await run_within(1.0, fails())


@virtual
async def test_cancelled_closing_finishes_before_task_ends() -> None:
    """Half-closed clients would keep their connections."""
    closing, deaf = asyncio.create_task(taking(1.0)), asyncio.create_task(deaf_to(2))
    for work in (run_within(2.0, closing_of(closing)), cancel_and_wait(deaf)):
        task = asyncio.create_task(work)
        await taking(0.5)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    assert closing.done()
    assert not closing.cancelled()
    assert deaf.cancelled()
