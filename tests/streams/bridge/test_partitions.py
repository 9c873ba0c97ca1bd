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
from schemas.records import StreamVoid, TokenFrame
from schemas.settings import LogSettings
from streams.bridge import partitions as bridge_partitions
from streams.bridge.partition_processor import PartitionProcessor
from streams.bridge.partitions import WAITING_MAX, BridgePartitions
from streams.bridge.records.record import PromptRecord
from streams.calls.stream.hub import AnswerProgress
from streams.log.clock import wall_ms
from streams.log.faust.group import Group
from streams.log.transactions import FullPlace
from tests.streams.bridge.memory_log import PLACE, Bridge, MemoryLog, memory_log
from tests.streams.bridge.samples import AskingBridge, pair
from tests.streams.gateway.samples import frame, stream_end
from tests.virtual_time import virtual
from tests.waits import meanwhile, pass_time, until

__all__ = ["memory_log"]  # a fixture
ANSWER = ["a", "b", "c", "d"]


def bridge_of(log: MemoryLog, asker: AskingBridge) -> Bridge:
    """Return a bridge whose tokens lie on the partition of `tokens` that is read live."""
    bridge = Bridge(log)
    log.frames = asker.log.frames
    bridge.asks_by(asker.asking, pair(format="avro"))
    return bridge


def request_id_of(asker: AskingBridge) -> str:
    return asker.log.requests[0].request_id


@virtual
async def test_partitions_lose_no_prompt_after_reassignment(
    memory_log: MemoryLog,
) -> None:
    """The old processor must not remove the new one's call from the hub."""
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
    assert not asker.asking.calls.in_flight, "one after the other"
    await until(lambda: len(asker.log.requests) == 2)
    await pass_time(5.0)
    whole = frame(request_id_of(asker), ANSWER, end=stream_end(request_id_of(asker), ANSWER))
    await asker.log.push(whole)
    await until(lambda: 0 in memory_log.answers())
    assert memory_log.answers()[0].text == "abcd" and not group.has_failed
    memory_log.slow_to_stop_s = 0.0
    await partitions.stop()
    assert asker.asking.calls.in_flight == 0
    assert not asker.asking.calls._calls and not len(asker.log.hub)
    assert not partitions._stopping, "nothing is kept of former lives"


@virtual
async def test_partitions_start_processor_after_predecessors_stop(memory_log: MemoryLog) -> None:
    """Also where a predecessor lost the partition before its own predecessor ended."""
    bridge, group, started_places = Bridge(memory_log), Group(), list[FullPlace]()

    def make(place: FullPlace) -> PartitionProcessor:
        started_places.append(place)
        return bridge.new_life()

    async def wait_until_sent() -> None:
        pass

    partitions = BridgePartitions(group, make, wait_until_sent)
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
    assert partitions.is_ready and started_places == [PLACE] * 3
    memory_log.slow_to_stop_s = 2.0
    partitions.on_assigned(set())
    await partitions.stop()
    assert not partitions._stopping and not group.has_failed


@pytest.mark.parametrize("trouble", [None, BrokerUnavailable("away")])
@virtual
async def test_partitions_commit_finished_answers_at_stop(
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
        await asker.log.push(frame(request_id, ["yes"], end=stream_end(request_id, ["yes"])))
        if not offset:
            await until(lambda: 0 in memory_log.answers())
    await until(lambda: bool(bridge.lives[0]._outbox))
    memory_log.trouble = trouble
    await partitions.stop()
    assert sorted(memory_log.answers()) == ([0] if trouble else [0, 1])
    assert memory_log.trouble is None and asker.asking.calls.in_flight == 0


@virtual
async def test_partitions_watch_checks_processors_for_stall(
    memory_log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It checks five times in the stall time, and tolerates an unavailable broker."""
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

    async def wait_until_sent() -> None:
        pass

    monkeypatch.setattr(bridge_partitions, "query_client", client)
    partitions = BridgePartitions(Group(), lambda _: bridge.new_life(), wait_until_sent)
    began_s = loop.time()
    async with meanwhile(partitions.watch(settings, 10_000)):
        await pass_time(3.0)
        partitions.on_assigned({PLACE})
        bridge.lives[0].check_for_stall = look  # type: ignore[method-assign]
        await pass_time(6.0)
    assert questions == [4.0, 6.0, 8.0] and looks == [(9, 10.0)] * 2
    await partitions.stop()


@virtual
async def test_partition_processor_releases_only_its_own_calls(memory_log: MemoryLog) -> None:
    """Its successor submits under the same ids, and its calls stay."""
    asker = AskingBridge()
    bridge = bridge_of(memory_log, asker)
    old = bridge.life()
    await old.take(memory_log.put(0))
    await until(lambda: len(asker.log.requests) == 1)
    new = bridge.life()
    await until(lambda: len(asker.log.requests) == 2)
    await old.stop()
    request_id = request_id_of(asker)
    await asker.log.push(frame(request_id, ["yes"], end=stream_end(request_id, ["yes"])))
    await until(lambda: 0 in memory_log.answers())
    await new.stop()
    assert asker.asking.calls.in_flight == 0


@virtual
async def test_call_without_tokens_ends_at_deadline(memory_log: MemoryLog) -> None:
    asker = AskingBridge()
    bridge = bridge_of(memory_log, asker)
    gateway = asker.asking.calls
    async with bridge.living() as life:
        await life.take(memory_log.put(0, {"text": "hi", "deadline_ms": 5_000}))
        await until(lambda: len(asker.log.requests) == 1)
        (call,) = gateway._calls
        gateway.hub.remove(call)
        await pass_time(8.0)
        gateway.sweep(asyncio.get_running_loop().time(), wall_ms())
        await until(lambda: 0 in memory_log.answers())
    assert memory_log.answers()[0].error_code == "deadline_exceeded"


@dataclass
class Consumer:
    """Records which partitions a bridge has paused, and how often it resumed any."""

    paused_places: set[FullPlace] = field(default_factory=set)
    came: int = 0

    def pause_partitions(self, places: set[FullPlace]) -> None:
        self.paused_places |= places

    def resume_partitions(self, places: set[FullPlace]) -> None:
        assert self.paused_places >= places
        self.paused_places -= places
        self.came += 1


@virtual
async def test_partitions_pause_only_full_partition(memory_log: MemoryLog) -> None:
    """A wait in the agent would block the topics of all pairs."""
    asker, consumer, group = AskingBridge(), Consumer(), Group()
    bridge = bridge_of(memory_log, asker)
    partitions = BridgePartitions(group, lambda _: bridge.new_life(), asker.asking.wait_until_sent)
    topic, _ = PLACE
    partitions.on_assigned({PLACE, (topic, 2)})
    full = bridge.lives[0]
    taken_offsets, taken_before = list[int](), 0
    room = asyncio.Event()

    async def wait_for_room(record: PromptRecord) -> None:
        nonlocal taken_before
        await room.wait()
        taken_offsets.append(record.offset)
        if consumer.paused_places:
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
            assert consumer.paused_places == ({PLACE} if offset >= WAITING_MAX - 1 else set())
        await partitions.take(topic, event(0, 2))
        await until(lambda: len(asker.log.requests) == 1)
        room.set()
        await until(lambda: taken_offsets == [*range(2 * WAITING_MAX)])
        assert not consumer.paused_places and (consumer.came, taken_before) == (
            1,
            WAITING_MAX * 3 // 2,
        )
        await partitions.take(topic, event(0, 3))  # of a partition that has left meanwhile
        assert not group.has_failed
        group.fail(BrokerUnavailable("over"))
        await partitions.take(topic, event(2 * WAITING_MAX, PLACE[1]))
        await pass_time(1.0)
        assert len(taken_offsets) == 2 * WAITING_MAX
    await partitions.stop()


def frames_of_two_attempts(request_id: str) -> list[TokenFrame]:
    """Return frames of a lost worker's two tokens, a void, and the attempt that resumes."""
    mark = replace(frame(request_id, []), voids=[StreamVoid(request_id=request_id, attempt=1)])
    end = stream_end(request_id, ANSWER, attempt=2)
    rest = frame(request_id, ANSWER[2:], attempt=2, first_seq=2, first_char=2, end=end)
    return [frame(request_id, ANSWER[:2]), mark, rest]


async def submit_before_takeover(
    memory_log: MemoryLog,
) -> tuple[AskingBridge, Bridge, list[TokenFrame]]:
    """Return an asker and a bridge whose first processor submitted a prompt and stopped."""
    asker = AskingBridge()
    bridge = bridge_of(memory_log, asker)
    first = bridge.life()
    await first.take(memory_log.put(0))
    await until(lambda: len(asker.log.requests) == 1)
    frames = frames_of_two_attempts(request_id_of(asker))
    await first.stop()
    return asker, bridge, frames


@virtual
async def test_answer_after_takeover_contains_tokens_of_both_attempts(
    memory_log: MemoryLog,
) -> None:
    """The tokens of both attempts count, whichever reader hears the second one first."""
    asker, bridge, frames = await submit_before_takeover(memory_log)
    memory_log.frames += frames
    memory_log.before_replay = lambda: asker.log.hub.apply(frames[2], 0.0)
    async with bridge.living():
        await pass_time(1.0)
        assert memory_log.answers()[0].text == "abcd"
    assert len(asker.log.requests) == 1


@virtual
async def test_partitions_report_live_voids_of_inherited_requests(memory_log: MemoryLog) -> None:
    """Routers wait for the position of readers on live marks, but not on past ones."""
    asker, bridge, frames = await submit_before_takeover(memory_log)
    notices = list[AnswerProgress]()
    asker.log.hub.on_void = notices.append
    memory_log.frames += frames[:1]
    async with bridge.living() as second:
        await second.take(memory_log.put(1))
        await until(lambda: len(asker.log.requests) == 3)
        assert not notices
        memory_log.frames += frames[1:]
        await until(lambda: 0 in memory_log.answers())
    (so_far,) = notices
    assert (so_far.request_id, so_far.attempt, so_far.chars) == (request_id_of(asker), 1, 2)


@virtual
async def test_answer_is_complete_after_second_takeover(
    memory_log: MemoryLog,
) -> None:
    """Commit notes keep the offset at which the tokens of the first attempt began."""
    asker, bridge, frames = await submit_before_takeover(memory_log)
    memory_log.frames += frames[:1]
    async with bridge.living() as second:
        await second.take(memory_log.put(1))
        await until(lambda: len(asker.log.requests) == 3)
        request_id = asker.log.requests[2].request_id
        await asker.log.push(frame(request_id, ["yes"], end=stream_end(request_id, ["yes"])))
        await until(lambda: 1 in memory_log.answers())
    memory_log.frames += frames[1:]
    async with bridge.living():
        await until(lambda: 0 in memory_log.answers())
    assert memory_log.answers()[0].text == "abcd"
