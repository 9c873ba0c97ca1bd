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
from schemas.log.cancellation import cancel_and_wait
from schemas.log.clients import AssignedReader, LogProducer
from schemas.log.lease_monitor import LEASES_MAX
from schemas.log.membership import Membership
from schemas.log.retry import run_with_reconnect
from schemas.records import Heartbeat, MemberKind, Registration
from schemas.settings import LogSettings
from tests.virtual import run_virtual, virtual
from tests.waiting import pass_time, until

CODEC, EPOCH = Codec(), 5


@dataclass
class Log:
    """Takes records; `answers` says whether it acknowledges them."""

    sent: list[Any] = field(default_factory=list)
    answers: bool = True

    async def send(self, topic: str, record: Any, **_: Any) -> "asyncio.Future[Any]":
        ack = asyncio.get_running_loop().create_future()
        if self.answers:
            self.sent.append(record)
            ack.set_result(None)
        return ack


def member(log: Log, copies: int = 1, kind: MemberKind = MemberKind.WORKER) -> Membership:
    settings = LogSettings(replication_factor=copies)
    found = Membership(settings, CODEC, cast(LogProducer, log), member_id="w", kind=kind)
    found.epoch = EPOCH
    return found


async def read(found: Membership, record: Any, logged_ms: int) -> None:
    """It finds the record in the log."""
    value = CODEC.encode(record)
    fields = ("fleet", 0, 0, logged_ms, 1, b"w", value, None, 1, len(value))
    await found._fold(ConsumerRecord(*fields, ()), logged_ms)


async def in_doubt() -> tuple[Membership, Log, Heartbeat]:
    """A member whose last beat was acknowledged too late to tell, and that beat."""
    log = Log()
    found = member(log)
    joined = Registration(member_id="w", epoch=EPOCH, kind=MemberKind.WORKER, started_ms=1)
    await read(found, joined, 1_000)
    await found.beat_now()
    await read(found, log.sent[0], 1_000)
    assert found.is_valid()
    await pass_time(LEASE_MS / 1000 + 0.1)
    assert not found.is_valid()
    await found.beat_now()
    assert not found.is_valid(), "an acknowledgement does not tell when it was written"
    return found, log, log.sent[1]


@virtual
async def test_doubt_ends_when_the_log_shows_that_the_lease_stood() -> None:
    """Whoever waited goes on."""
    found, _, beat = await in_doubt()
    waiting = asyncio.create_task(found.wait_until_valid())
    await pass_time(0.1)
    assert not waiting.done()
    await read(found, beat, 1_000 + LEASE_MS)
    await waiting
    assert found.is_valid()


@virtual
async def test_doubt_ends_the_life_when_the_log_shows_a_gap() -> None:
    """The beat came, and too late."""
    found, _, beat = await in_doubt()
    for seq in range(1, 3):  # others could write
        await read(found, replace(beat, member_id="other", seq=seq), 1_000 + seq * DEAF_MS)
    with pytest.raises(LeaseError, match="fenced"):
        await read(found, beat, 1_001 + LEASE_MS)
    assert not found.is_valid()


@dataclass
class Fleet:
    """Brings a record whenever `heard` is set."""

    heard: asyncio.Event = field(default_factory=asyncio.Event)

    async def batch(self, **_: Any) -> list[ConsumerRecord]:
        await self.heard.wait()
        self.heard.clear()
        return [ConsumerRecord("fleet", 0, 0, 0, 1, b"w", None, None, 1, 0, ())]


@virtual
async def test_a_member_waits_for_another_leader_while_it_hears_nobody() -> None:
    """Where the log has copies; and when others are heard, for a lease more."""
    log, fleet = Log(), Fleet()
    found = member(log, copies=3)
    found._reader = cast(AssignedReader, fleet)
    await found.beat_now()
    assert found.is_valid()
    log.answers = False
    beating = asyncio.create_task(found._beat_forever())
    await pass_time((LEASES_MAX + 2) * LEASE_MS / 1000)
    assert not beating.done() and found.waits_for_leader() and not found.is_valid()
    fleet.heard.set()
    await found._read_on()
    assert found.waits_for_leader(), "its own heartbeat may not be read back yet"
    for _ in range(8):  # others are heard, and it is not
        fleet.heard.set()
        await found._read_on()
        await pass_time(0.5)
    assert not found.waits_for_leader()
    with pytest.raises(LeaseError, match="no acknowledged heartbeat"):
        await beating


def test_a_silence_that_lasts_is_no_change_of_leaders() -> None:
    async def main() -> None:
        log = Log()
        found = member(log, copies=3)
        await found.beat_now()
        log.answers = False
        with pytest.raises(LeaseError, match=f"for {SILENCE_MAX_MS} ms"):
            await found._beat_forever()

    run_virtual(main(), seconds=(SILENCE_MAX_MS + 2 * LEASE_MS) / 1000)


@virtual
async def test_without_any_word_the_lease_is_given_up_after_two_lengths() -> None:
    log = Log()
    found = member(log)
    await found.beat_now()
    log.answers = False
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(LeaseError, match="no acknowledged heartbeat"):
        await found._beat_forever()
    lasted_ms = (asyncio.get_running_loop().time() - began_s) * 1000
    assert LEASES_MAX * LEASE_MS < lasted_ms <= (LEASES_MAX + 1) * LEASE_MS
    assert LEASES_MAX >= 2, "doubt begins after one"


@virtual
async def test_lives_follow_each_other_until_one_is_drained_or_the_name_is_taken() -> None:
    """Whatever the trouble is, if it lies outside."""
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
async def test_waiting_for_a_broker_can_be_stopped() -> None:
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


def _nobody() -> set[str]:
    raise KafkaTimeoutError


@pytest.mark.parametrize(
    ("topics", "error"),
    [(_nobody, BrokerUnavailable), (lambda: {"fleet"}, BrokerUnavailable), (set, TopicError)],
)
async def test_silence_is_not_taken_for_a_missing_topic(
    topics: Callable[[], set[str]], error: type[Exception]
) -> None:
    """The one passes by itself, the other ends a start."""
    reader = AssignedReader(LogSettings(), "fleet", [0], client_id="test")
    reader._consumer = Silent(topics)  # as much of one as is asked
    with pytest.raises(error, match="fleet: cannot be read"):
        await reader.end_offsets()


@virtual
async def test_members_of_a_host_beat_together_and_never_later() -> None:
    """Whenever they have begun, and after a stall at once; routers in between."""
    loop, beat_s = asyncio.get_running_loop(), HEARTBEAT_MS / 1000
    tasks: list[asyncio.Task[None]] = []

    def beating(kind: MemberKind) -> list[float]:
        """It begins to; when it does."""
        found, times = member(Log(), kind=kind), list[float]()

        async def beat_now() -> None:
            times.append(loop.time())
            if len(times) == 4:
                await pass_time(2.2 * beat_s)  # a broker that is slow, once

        found.beat_now = beat_now  # type: ignore[method-assign]
        tasks.append(asyncio.create_task(found._beat_forever()))
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
    halves = [{round(2 * each / beat_s, 3) % 2 for each in times[5:]} for times in (first, second)]
    assert halves == [{0}, {0}], "where they are"
    assert {round(2 * each / beat_s, 3) % 2 for each in router[5:]} == {1}
