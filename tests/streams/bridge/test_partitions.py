"""Partitions of prompts that leave a bridge, come back, or come from another: on virtual time, by a
gateway's own way in, over a log in memory.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from schemas.errors import BrokerUnavailable, TriviumError
from schemas.log.clock import wall_ms
from schemas.log.faust.group import Group
from schemas.log.transactions import FullPlace
from schemas.records import StreamVoid, TokenFrame
from schemas.settings import LogSettings
from streams.bridge import partitions as bridge_partitions
from streams.bridge.partition_processor import PartitionProcessor
from streams.bridge.partitions import WAITING_MAX, BridgePartitions
from streams.bridge.records.record import PromptRecord
from streams.gateway.stream.hub import AnswerProgress
from tests.streams.bridge.lives import PLACE, Bridge, MemoryLog, memory_log
from tests.streams.bridge.samples import AskingBridge, pair
from tests.streams.gateway.samples import ended, frame
from tests.virtual import virtual
from tests.waiting import meanwhile, pass_time, until

__all__ = ["memory_log"]  # a fixture
ANSWER = ["a", "b", "c", "d"]


def bridge_of(log: MemoryLog, asker: AskingBridge) -> Bridge:
    """Its tokens lie on the partition of `tokens` that is read live, too."""
    bridge = Bridge(log)
    log.frames = asker.log.frames
    bridge.asks_by(asker.asking, pair(format="avro"))
    return bridge


def request_id_of(asker: AskingBridge) -> str:
    return asker.log.requests[0].request_id


@virtual
async def test_a_partition_that_leaves_and_comes_back_loses_no_prompt(
    memory_log: MemoryLog,
) -> None:
    """The old life took the new one's call out of the hub, which then heard nothing, not even its
    deadline."""
    asker = AskingBridge()
    bridge = bridge_of(memory_log, asker)
    group = Group()
    partitions = BridgePartitions(group, lambda _: bridge.new_life(), asker.asking.wait_until_sent)
    partitions.on_assigned({PLACE})
    memory_log.put(0)
    await bridge.lives[0].take(memory_log.prompts[0])
    await until(lambda: len(asker.log.requests) == 1)
    memory_log.slow_to_stop_s = 2.0
    await partitions.on_revoked()
    partitions.on_assigned(set())
    partitions.on_assigned({PLACE})
    await pass_time(1.0)
    assert not asker.asking.gateway.in_flight, "one after the other"
    await until(lambda: len(asker.log.requests) == 2)
    await pass_time(5.0)
    whole = frame(request_id_of(asker), ANSWER, end=ended(request_id_of(asker), ANSWER))
    await asker.log.push(whole)
    await until(lambda: 0 in memory_log.answers())
    assert memory_log.answers()[0].text == "abcd" and not group.has_failed
    memory_log.slow_to_stop_s = 0.0
    await partitions.stop()
    assert asker.asking.gateway.in_flight == 0
    assert not asker.asking.gateway.calls and not len(asker.log.hub)
    assert not partitions._stopping, "nothing is kept of former lives"


@virtual
async def test_a_life_begins_behind_all_former_ones_of_its_place(memory_log: MemoryLog) -> None:
    """Where one has left again before the one before it was over, too."""
    bridge, group, made = Bridge(memory_log), Group(), list[FullPlace]()

    def make(place: FullPlace) -> PartitionProcessor:
        made.append(place)
        return bridge.new_life()

    async def sent() -> None:
        pass

    partitions = BridgePartitions(group, make, sent)
    memory_log.slow_to_stop_s = 5.0
    partitions.on_assigned({PLACE})
    await until(lambda: bridge.lives[0].is_ready)
    for places in (set[FullPlace](), {PLACE}, set[FullPlace](), {PLACE}):
        partitions.on_assigned(places)
        await pass_time(0.1)
        memory_log.slow_to_stop_s = 0.0
    await pass_time(4.0)
    assert memory_log.commits == 1 and not partitions.is_ready
    await until(lambda: bridge.lives[2].is_ready)
    assert partitions.is_ready and made == [PLACE] * 3
    memory_log.slow_to_stop_s = 2.0
    partitions.on_assigned(set())
    await partitions.stop()
    assert not partitions._stopping and not group.has_failed


@pytest.mark.parametrize("trouble", [None, BrokerUnavailable("away")])
@virtual
async def test_who_stops_commits_what_has_ended_and_leaves_the_rest(
    memory_log: MemoryLog, trouble: TriviumError | None
) -> None:
    asker, group = AskingBridge(), Group()
    bridge = bridge_of(memory_log, asker)
    partitions = BridgePartitions(group, lambda _: bridge.new_life(), asker.asking.wait_until_sent)
    partitions.on_assigned({PLACE})
    for offset in range(3):
        await bridge.lives[0].take(memory_log.put(offset))
    await until(lambda: len(asker.log.requests) == 3)
    for offset in range(2):
        request_id = asker.log.requests[offset].request_id
        await asker.log.push(frame(request_id, ["yes"], end=ended(request_id, ["yes"])))
        if not offset:
            await until(lambda: 0 in memory_log.answers())
    await until(lambda: bool(bridge.lives[0]._outbox))
    memory_log.trouble = trouble
    await partitions.stop()
    assert sorted(memory_log.answers()) == ([0] if trouble else [0, 1])
    assert memory_log.trouble is None and asker.asking.gateway.in_flight == 0


@virtual
async def test_lives_are_asked_whether_something_is_left_out(
    memory_log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five times in the time after which they are stuck; a broker may be away meanwhile."""
    bridge, settings = Bridge(memory_log), LogSettings()
    questions, looks, answers = list[float](), list[Any](), [KafkaError("away")]
    loop = asyncio.get_running_loop()

    async def end_offsets(places: list[TopicPartition]) -> dict[TopicPartition, int]:
        assert places == [TopicPartition(*PLACE)]
        questions.append(round(loop.time() - began_s, 9))
        if answers:
            raise answers.pop()
        return {TopicPartition(*PLACE): 9, TopicPartition("gone", 0): 9}

    @asynccontextmanager
    async def client(log: LogSettings, *, committed_only: bool) -> AsyncGenerator[Any]:
        assert log is settings and committed_only
        yield SimpleNamespace(end_offsets=end_offsets)

    async def look(end: int, stall_s: float) -> None:
        looks.append((end, stall_s))

    async def sent() -> None:
        pass

    monkeypatch.setattr(bridge_partitions, "query_client", client)
    partitions = BridgePartitions(Group(), lambda _: bridge.new_life(), sent)
    began_s = loop.time()
    async with meanwhile(partitions.watch(settings, 10_000)):
        await pass_time(3.0)
        partitions.on_assigned({PLACE})
        bridge.lives[0].check_for_stall = look  # type: ignore[method-assign]
        await pass_time(6.0)
    assert questions == [4.0, 6.0, 8.0] and looks == [(9, 10.0)] * 2
    await partitions.stop()


@virtual
async def test_a_life_that_ends_lets_go_of_its_calls_alone(memory_log: MemoryLog) -> None:
    """One that is left behind as it ends, too: the next life asks under the same ids."""
    asker = AskingBridge()
    bridge = bridge_of(memory_log, asker)
    old = bridge.life()
    await old.take(memory_log.put(0))
    await until(lambda: len(asker.log.requests) == 1)
    new = bridge.life()
    await until(lambda: len(asker.log.requests) == 2)
    await old.stop()
    request_id = request_id_of(asker)
    await asker.log.push(frame(request_id, ["yes"], end=ended(request_id, ["yes"])))
    await until(lambda: 0 in memory_log.answers())
    await new.stop()
    assert asker.asking.gateway.in_flight == 0


@virtual
async def test_a_call_that_nothing_reaches_ends_at_its_deadline(memory_log: MemoryLog) -> None:
    asker = AskingBridge()
    bridge = bridge_of(memory_log, asker)
    gateway = asker.asking.gateway
    async with bridge.living() as life:
        await life.take(memory_log.put(0, {"text": "hi", "deadline_ms": 5_000}))
        await until(lambda: len(asker.log.requests) == 1)
        (call,) = gateway.calls
        gateway.hub.remove(call)
        await pass_time(8.0)
        gateway.sweep(asyncio.get_running_loop().time(), wall_ms())
        await until(lambda: 0 in memory_log.answers())
    assert memory_log.answers()[0].error_code == "deadline_exceeded"


@dataclass
class Consumer:
    """Which partitions a bridge has held, and how often it let any come again."""

    held: set[FullPlace] = field(default_factory=set)
    came: int = 0

    def pause_partitions(self, places: set[FullPlace]) -> None:
        self.held |= places

    def resume_partitions(self, places: set[FullPlace]) -> None:
        assert self.held >= places
        self.held -= places
        self.came += 1


@virtual
async def test_a_partition_without_room_keeps_no_other_waiting(memory_log: MemoryLog) -> None:
    """Agents waited for room, and Faust hands over records of all topics in turn: a partition full
    of prompts of 33 kB kept those of all pairs waiting, and each life ended after 15 s of it."""
    asker, consumer, group = AskingBridge(), Consumer(), Group()
    bridge = bridge_of(memory_log, asker)
    partitions = BridgePartitions(group, lambda _: bridge.new_life(), asker.asking.wait_until_sent)
    topic, _ = PLACE
    partitions.on_assigned({PLACE, (topic, 2)})
    full = bridge.lives[0]
    taken, taken_before = list[int](), 0
    room = asyncio.Event()

    async def wait_for_room(record: PromptRecord) -> None:
        nonlocal taken_before
        await room.wait()
        taken.append(record.offset)
        if consumer.held:
            taken_before += 1

    full.take = wait_for_room  # type: ignore[method-assign]

    def event(offset: int, partition: int) -> Any:
        record = replace(memory_log.put(offset), partition=partition)
        message = SimpleNamespace(
            **{name: getattr(record, name) for name in record.__dataclass_fields__},
            timestamp=0.0, timestamp_type=0,
        )  # fmt: skip
        return SimpleNamespace(message=message, app=SimpleNamespace(consumer=consumer))

    async with asyncio.timeout(60.0):
        for offset in range(2 * WAITING_MAX):
            await partitions.take(topic, event(offset, PLACE[1]))
            assert consumer.held == ({PLACE} if offset >= WAITING_MAX - 1 else set())
        await partitions.take(topic, event(0, 2))
        await until(lambda: len(asker.log.requests) == 1)
        room.set()
        await until(lambda: taken == [*range(2 * WAITING_MAX)])
        assert not consumer.held and (consumer.came, taken_before) == (1, WAITING_MAX * 3 // 2)
        await partitions.take(topic, event(0, 3))  # of a partition that has left meanwhile
        assert not group.has_failed
        group.fail(BrokerUnavailable("over"))
        await partitions.take(topic, event(2 * WAITING_MAX, PLACE[1]))
        await pass_time(1.0)
        assert len(taken) == 2 * WAITING_MAX
    await partitions.stop()


def began_and_went_on(request_id: str) -> list[TokenFrame]:
    """A worker is lost behind two tokens, and the next one goes on behind them."""
    mark = replace(frame(request_id, []), voids=[StreamVoid(request_id=request_id, attempt=1)])
    end = ended(request_id, ANSWER, attempt=2)
    rest = frame(request_id, ANSWER[2:], attempt=2, first_seq=2, first_char=2, end=end)
    return [frame(request_id, ANSWER[:2]), mark, rest]


async def asked_by_a_life_before(
    memory_log: MemoryLog,
) -> tuple[AskingBridge, Bridge, list[TokenFrame]]:
    """A prompt that was asked by a life that has stopped, and what comes of it."""
    asker = AskingBridge()
    bridge = bridge_of(memory_log, asker)
    first = bridge.life()
    await first.take(memory_log.put(0))
    await until(lambda: len(asker.log.requests) == 1)
    frames = began_and_went_on(request_id_of(asker))
    await first.stop()
    return asker, bridge, frames


@virtual
async def test_an_answer_that_went_on_is_whole_whoever_reads_its_partition_further_on(
    memory_log: MemoryLog,
) -> None:
    """The bridge's own reader, or another of its lives: the second attempt was heard first, then
    the first one's tokens no more, and the prompt was asked again."""
    asker, bridge, frames = await asked_by_a_life_before(memory_log)
    memory_log.frames += frames
    memory_log.before_replay = lambda: asker.log.hub.apply(frames[2], 0.0)
    async with bridge.living():
        await pass_time(1.0)
        assert memory_log.answers()[0].text == "abcd"
    assert len(asker.log.requests) == 1


@virtual
async def test_of_what_others_asked_marks_that_come_live_are_told(memory_log: MemoryLog) -> None:
    """Routers ask how far readers are, whoever reads; of marks in the past nobody waits."""
    asker, bridge, frames = await asked_by_a_life_before(memory_log)
    heard = list[AnswerProgress]()
    asker.log.hub.on_void = heard.append
    memory_log.frames += frames[:1]
    async with bridge.living() as second:
        await second.take(memory_log.put(1))
        await until(lambda: len(asker.log.requests) == 3)
        assert not heard
        memory_log.frames += frames[1:]
        await until(lambda: 0 in memory_log.answers())
    (so_far,) = heard
    assert (so_far.request_id, so_far.attempt, so_far.chars) == (request_id_of(asker), 1, 2)


@virtual
async def test_what_was_heard_of_in_part_is_whole_after_a_second_takeover(
    memory_log: MemoryLog,
) -> None:
    """Its tokens are noted from where they began, whoever was asking by then."""
    asker, bridge, frames = await asked_by_a_life_before(memory_log)
    memory_log.frames += frames[:1]
    async with bridge.living() as second:
        await second.take(memory_log.put(1))
        await until(lambda: len(asker.log.requests) == 3)
        other = asker.log.requests[2].request_id
        await asker.log.push(frame(other, ["yes"], end=ended(other, ["yes"])))
        await until(lambda: 1 in memory_log.answers())
    memory_log.frames += frames[1:]
    async with bridge.living():
        await until(lambda: 0 in memory_log.answers())
    assert memory_log.answers()[0].text == "abcd"
