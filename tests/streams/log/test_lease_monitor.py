"""What a member in doubt of its lease knows, and from where; no broker, and virtual time."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

import pytest
from aiokafka import ConsumerRecord
from aiokafka.errors import KafkaTimeoutError

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, LeaseError, NameTaken, TopicError
from schemas.fleet import DEAF_MS, HEARTBEAT_MS, LEASE_MS, SILENCE_MAX_MS
from schemas.records import Heartbeat, MemberKind, Registration
from schemas.settings import LogSettings
from streams.log.cancellation import cancel_and_wait
from streams.log.clients import AssignedReader, LogProducer
from streams.log.lease_monitor import LEASES_MAX
from streams.log.membership import Membership
from streams.log.retry import run_with_reconnect
from tests.virtual_time import run_virtual, virtual
from tests.waits import pass_time, until

CODEC, EPOCH = Codec(), 5


@dataclass
class Log:
    """Takes records; `answers` says whether it acknowledges them."""

    records: list[Any] = field(default_factory=list)
    answers: bool = True

    async def send(self, topic: str, record: Any, **_: Any) -> "asyncio.Future[Any]":
        ack = asyncio.get_running_loop().create_future()
        if self.answers:
            self.records.append(record)
            ack.set_result(None)
        return ack


def member(log: Log, copies: int = 1, kind: MemberKind = MemberKind.WORKER) -> Membership:
    settings = LogSettings(replication_factor=copies)
    membership = Membership(settings, CODEC, cast(LogProducer, log), member_id="w", kind=kind)
    membership.epoch = EPOCH
    return membership


async def read(membership: Membership, record: Any, logged_ms: int) -> None:
    """Have the member find the record in the log."""
    value = CODEC.encode(record)
    fields = ("fleet", 0, 0, logged_ms, 1, b"w", value, None, 1, len(value))
    await membership._fold(ConsumerRecord(*fields, ()), logged_ms)


async def in_doubt() -> tuple[Membership, Log, Heartbeat]:
    """Return a member whose last heartbeat was acknowledged late, its log and that heartbeat."""
    log = Log()
    membership = member(log)
    joined = Registration(member_id="w", epoch=EPOCH, kind=MemberKind.WORKER, started_ms=1)
    await read(membership, joined, 1_000)
    await membership.beat_now()
    await read(membership, log.records[0], 1_000)
    assert membership.is_valid()
    await pass_time(LEASE_MS / 1000 + 0.1)
    assert not membership.is_valid()
    await membership.beat_now()
    assert not membership.is_valid(), "an acknowledgement does not tell when it was written"
    return membership, log, log.records[1]


@virtual
async def test_member_leaves_doubt_when_log_shows_heartbeat_in_time() -> None:
    """A task that waited for validity continues."""
    membership, _, beat = await in_doubt()
    waiting = asyncio.create_task(membership.wait_until_valid())
    await pass_time(0.1)
    assert not waiting.done()
    await read(membership, beat, 1_000 + LEASE_MS)
    await waiting
    assert membership.is_valid()


@virtual
async def test_member_is_fenced_when_log_shows_late_heartbeat() -> None:
    membership, _, beat = await in_doubt()
    for seq in range(1, 3):  # others could write
        await read(membership, replace(beat, member_id="other", seq=seq), 1_000 + seq * DEAF_MS)
    with pytest.raises(LeaseError, match="fenced"):
        await read(membership, beat, 1_001 + LEASE_MS)
    assert not membership.is_valid()


@dataclass
class Fleet:
    """Brings a record whenever `arrival` is set."""

    arrival: asyncio.Event = field(default_factory=asyncio.Event)

    async def batch(self, **_: Any) -> list[ConsumerRecord]:
        await self.arrival.wait()
        self.arrival.clear()
        return [ConsumerRecord("fleet", 0, 0, 0, 1, b"w", None, None, 1, 0, ())]


@virtual
async def test_member_waits_for_new_leader_during_silence() -> None:
    """With copies of the log it waits; once others are heard, for one lease more."""
    log, fleet = Log(), Fleet()
    membership = member(log, copies=3)
    membership._reader = cast(AssignedReader, fleet)
    await membership.beat_now()
    assert membership.is_valid()
    log.answers = False
    beating = asyncio.create_task(membership._beat_forever())
    await pass_time((LEASES_MAX + 2) * LEASE_MS / 1000)
    assert not beating.done() and membership.waits_for_leader() and not membership.is_valid()
    fleet.arrival.set()
    await membership._read_on()
    assert membership.waits_for_leader(), "its own heartbeat may not be read back yet"
    for _ in range(8):  # others are heard, and it is not
        fleet.arrival.set()
        await membership._read_on()
        await pass_time(0.5)
    assert not membership.waits_for_leader()
    with pytest.raises(LeaseError, match="no acknowledged heartbeat"):
        await beating


def test_member_gives_up_lease_after_longest_silence() -> None:
    async def main() -> None:
        log = Log()
        membership = member(log, copies=3)
        await membership.beat_now()
        log.answers = False
        with pytest.raises(LeaseError, match=f"for {SILENCE_MAX_MS} ms"):
            await membership._beat_forever()

    run_virtual(main(), seconds=(SILENCE_MAX_MS + 2 * LEASE_MS) / 1000)


@virtual
async def test_member_without_acknowledgement_gives_up_after_lease_limit() -> None:
    log = Log()
    membership = member(log)
    await membership.beat_now()
    log.answers = False
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(LeaseError, match="no acknowledged heartbeat"):
        await membership._beat_forever()
    lasted_ms = (asyncio.get_running_loop().time() - began_s) * 1000
    assert LEASES_MAX * LEASE_MS < lasted_ms <= (LEASES_MAX + 1) * LEASE_MS
    assert LEASES_MAX >= 2, "doubt begins after one"


@virtual
async def test_reconnect_loop_retries_outside_trouble_and_raises_other_errors() -> None:
    """A session that returns ends the loop; a taken name and a bug are raised."""
    troubles: list[BaseException | None] = [
        BrokerUnavailable("x"),
        OSError(),
        LeaseError("x"),
        None,
    ]
    lives = len(troubles)

    async def life() -> None:
        nonlocal lives
        lives -= 1
        if (trouble := troubles.pop(0)) is not None:
            raise trouble

    await run_with_reconnect("w", life, asyncio.Event())
    assert lives == 0
    for ends in (NameTaken("two have its name"), ValueError("a bug")):
        troubles.append(ends)
        with pytest.raises(type(ends)):
            await run_with_reconnect("w", life, asyncio.Event())


@virtual
async def test_reconnect_loop_stops_while_broker_is_away() -> None:
    stop = asyncio.Event()

    async def life() -> None:
        raise BrokerUnavailable("nobody answers")

    waiting = asyncio.create_task(run_with_reconnect("w", life, stop))
    await pass_time(20)
    assert not waiting.done()
    stop.set()
    await until(waiting.done)
    waiting.result()


class Silent:
    """A consumer of a broker that is away, or that has no such topic."""

    def __init__(self, topics: Callable[[], set[str]]) -> None:
        self._topics = topics

    async def end_offsets(self, _: Any) -> Any:
        raise KafkaTimeoutError

    async def topics(self) -> set[str]:
        return self._topics()


def _topics_time_out() -> set[str]:
    raise KafkaTimeoutError


@pytest.mark.parametrize(
    ("topics", "error"),
    [
        (_topics_time_out, BrokerUnavailable),
        (lambda: {"fleet"}, BrokerUnavailable),
        (set, TopicError),
    ],
)
async def test_reader_distinguishes_silent_broker_from_missing_topic(
    topics: Callable[[], set[str]], error: type[Exception]
) -> None:
    """Silence ends by itself; a missing topic ends the start."""
    reader = AssignedReader(LogSettings(), "fleet", [0], client_id="test")
    reader._consumer = Silent(topics)  # as much of one as is asked
    with pytest.raises(error, match="fleet: cannot be read"):
        await reader.end_offsets()


@virtual
async def test_members_of_host_align_heartbeats_and_send_none_late() -> None:
    """They align whenever they begin and resume right after a stall; routers beat in between."""
    loop, beat_s = asyncio.get_running_loop(), HEARTBEAT_MS / 1000
    tasks: list[asyncio.Task[None]] = []

    def beating(kind: MemberKind) -> list[float]:
        """Start heartbeats of a member, and return the list of their times."""
        membership, times = member(Log(), kind=kind), list[float]()

        async def beat_now() -> None:
            times.append(loop.time())
            if len(times) == 4:
                await pass_time(2.2 * beat_s)  # a broker that is slow, once

        membership.beat_now = beat_now  # type: ignore[method-assign]
        tasks.append(asyncio.create_task(membership._beat_forever()))
        return times

    await pass_time(0.13)
    first = beating(MemberKind.WORKER)
    await pass_time(0.18)
    second, router = beating(MemberKind.GATEWAY), beating(MemberKind.ROUTER)
    await pass_time(5.2)
    await cancel_and_wait(*tasks)
    for times in (first, second, router):
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert gaps[3] == pytest.approx(2.2 * beat_s), "late, so it is sent at once"
        assert max(gaps[:3] + gaps[4:]) <= beat_s * 1.0001
    halves = [
        {round(2 * time_s / beat_s, 3) % 2 for time_s in times[5:]} for times in (first, second)
    ]
    assert halves == [{0}, {0}], "where they are"
    assert {round(2 * time_s / beat_s, 3) % 2 for time_s in router[5:]} == {1}
