"""How much there is of an answer, told to its router."""

import asyncio
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError

from schemas.records import Continued, Endpoint, StreamVoid
from schemas.rules.tokens import pack_tokens
from streams.agents.outbox import void_frame
from streams.calls.log.answers import ProgressReporter
from streams.calls.stream.event_id import StreamKey
from streams.calls.stream.hub import AnswerProgress, Call, Hub
from tests.streams.gateway.samples import frame, stream_end
from tests.waits import until


class Producer:
    """Takes records; refuses the first of them with what it was given."""

    def __init__(self, *refusals: Exception) -> None:
        self.records: list[tuple[str, Continued, int]] = []
        self._refusals = list(refusals)

    def session_partition(self, session_id: str) -> int:
        return len(session_id)

    async def send(self, topic: str, record: Any, *, key: str, partition: int) -> Any:
        if self._refusals:
            raise self._refusals.pop()
        self.records.append((topic, record, partition))
        ack = asyncio.get_running_loop().create_future()
        ack.set_result(None)
        return ack


def reading(hub: Hub, request_id: str = "r1") -> Call:
    key = StreamKey(
        parent_id=request_id, session_id="s1", model="m", endpoint=Endpoint.CHAT,
        partition=0, offset=0, created_s=0, deadline_ms=0, choices=1,
    )  # fmt: skip
    call = Call(key, deadline_ms=0, arrived_s=0.0, waits_for_end=False)
    call.add(request_id, 0)
    hub.add(call)
    return call


def mark(hub: Hub, attempt: int = 1, request_id: str = "r1") -> None:
    void = StreamVoid(request_id=request_id, attempt=attempt)
    hub.apply(void_frame(void, "router-a", 1), 0.0)


async def reports_of(*refusals: Exception, marks: int = 1) -> list[tuple[str, Continued, int]]:
    hub, producer = Hub(), Producer(*refusals)
    answers = ProgressReporter("gateway-a", hub, producer=lambda: producer)  # type: ignore[arg-type,return-value]  # what it calls
    stream = reading(hub).streams[0]
    stream.push(1, 0, 0, 2, "ab", (5, 6))
    writing = asyncio.create_task(answers.write())
    for _ in range(marks):
        mark(hub)
        await until(lambda: not answers._pending)
    await until(lambda: len(producer.records) >= marks - len(refusals))
    writing.cancel()
    return producer.records


async def test_progress_reporter_writes_progress_of_voided_attempt() -> None:
    ((topic, record, partition),) = await reports_of()
    assert (topic, partition) == ("phases", 2)
    assert (record.request_id, record.session_id, record.attempt) == ("r1", "s1", 1)
    assert (record.tokens, record.chars) == (pack_tokens([5, 6]), 2)
    assert record.written_by == "gateway-a"


async def test_progress_reporter_survives_write_error_until_next_mark() -> None:
    records = await reports_of(KafkaConnectionError(), marks=2)
    assert len(records) == 1


async def test_progress_reporter_writes_once_per_attempt() -> None:
    """Polls of a stored response read the same mark again."""
    hub, producer = Hub(), Producer()
    answers = ProgressReporter("gateway-a", hub, producer=lambda: producer)  # type: ignore[arg-type,return-value]  # what it calls
    for attempt in (1, 1, 2, 1, 2):
        replay_hub = Hub(on_void=hub.on_void)
        reading(replay_hub)
        mark(replay_hub, attempt)
    writing = asyncio.create_task(answers.write())
    await until(lambda: len(producer.records) > 1)
    writing.cancel()
    assert [record.attempt for _, record, _ in producer.records] == [1, 2]


@pytest.mark.parametrize("order", ["mark, end", "end, mark", "mark, end, mark", "gap, mark, end"])
async def test_hub_reports_end_of_voided_attempt(order: str) -> None:
    """The order of mark and end on the log does not matter."""
    hub, reports = Hub(), list[AnswerProgress]()
    hub.on_void = reports.append
    reading(hub)
    end = stream_end("r1", ["a", "b"], attempt=1)
    rows = frame("r1", ["a", "b"])
    if not order.startswith("gap"):
        hub.apply(rows, 0.0)
    for step in order.split(", "):
        if step == "mark":
            mark(hub)
        else:
            hub.apply(frame("r1", [], end=end), 0.0)
    if order.startswith("gap"):
        assert not [so_far for so_far in reports if so_far.end]
        hub.apply(rows, 0.0)
    end_reports = [(so_far.attempt, so_far.session_id) for so_far in reports if so_far.end == end]
    assert set(end_reports) == {(1, "s1")}


@pytest.mark.parametrize("replayed", [["end"], ["mark", "end"], ["mark"]])
async def test_live_hub_reports_replayed_end_of_voided_attempt(replayed: list[str]) -> None:
    """Otherwise the router would run another attempt, which nobody reads."""
    first_hub, reports = Hub(), list[AnswerProgress]()
    call = reading(first_hub)
    end = stream_end("r1", ["a", "b"], attempt=1)
    frames = {"end": frame("r1", ["a", "b"], end=end)}
    for hub, steps in ((first_hub, replayed), (Hub(), {"mark", "end"} - set(replayed))):
        if hub is not first_hub:
            hub.add(call)
            hub.go_live(reports.append)
        for step in steps:
            if step == "mark":
                mark(hub)
            else:
                hub.apply(frames[step], 0.0)
    assert [so_far.attempt for so_far in reports if so_far.end == end] == [1]


async def test_hub_ignores_end_of_attempt_without_void_mark() -> None:
    hub, reports = Hub(), list[AnswerProgress]()
    hub.on_void = reports.append
    reading(hub)
    hub.apply(frame("r1", ["a"], attempt=2, end=stream_end("r1", ["a"], attempt=2)), 0.0)
    mark(hub, 1)
    assert not reports


async def test_hub_reports_only_active_streams_at_voided_attempt() -> None:
    hub = Hub()
    attempts: list[int] = []
    hub.on_void = lambda so_far: attempts.append(so_far.attempt)
    stream = reading(hub).streams[0]
    mark(hub, request_id="r9")
    stream.push(2, 0, 0, 1, "a", (5,))
    mark(hub, 1)
    mark(hub, 2)
    assert attempts == [2]
