"""Records that are too large: a router goes on, and says what became of the request."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from aiokafka.errors import MessageSizeTooLargeError

from schemas.codec import Codec
from schemas.errors import MESSAGE_CHARS_MAX, RecordTooLarge
from schemas.records import OutcomeKind, Phase, PhaseKind, WireError, Work
from schemas.rules.sizes import REQUEST_BYTES_MAX
from streams.agents.outbox import Lane, Outbox
from streams.core.effects import Decide, Dispatch, End
from streams.core.events import PhaseArrived
from tests.schemas.examples import TRACEPARENT
from tests.streams import builders
from tests.streams.agents.fakes import FakeEvent, FakeProducer, process_with_partition
from tests.streams.core.router_harness import PARTITION
from tests.streams.core.router_setups import replicas
from tests.waiting import until


class SmallProducer(FakeProducer):
    """Takes no work: by itself, or by the word of its broker."""

    def __init__(self, *, by_broker: bool, kind: type = Work) -> None:
        super().__init__()
        self.by_broker, self.kind = by_broker, kind

    async def send(self, topic: str, record: Any, **more: Any) -> asyncio.Future[None]:
        if not isinstance(record, self.kind):
            return await super().send(topic, record, **more)
        if not self.by_broker:
            raise RecordTooLarge("decode[0]: not sent")
        ack: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ack.set_exception(MessageSizeTooLargeError("too large"))
        return ack


def outbox_of(producer: Any) -> Outbox:
    """With a lease that stands."""

    async def stands() -> None:
        return

    return Outbox(producer, "test.", "router-a", 9, stands)


def test_a_trace_of_another_form_goes_no_further() -> None:
    """Whoever wrote the request (issue 10, 15)."""
    box = outbox_of(FakeProducer())
    box.trace("r1", [("traceparent", b"f" * 4_000)])
    assert not box.traces
    box.trace("r1", [("traceparent", TRACEPARENT)])
    assert box.traces == {"r1": TRACEPARENT}


@pytest.mark.parametrize("by_broker", [False, True])
async def test_work_that_cannot_be_sent_fails_its_request_and_not_the_router(
    by_broker: bool,
) -> None:
    """One oversized request took routers down, and kept them down (issue 10, 15)."""
    producer = SmallProducer(by_broker=by_broker)
    box, lane, acked = outbox_of(producer), Lane(), list[str]()
    task = asyncio.create_task(box.run())
    scene = replicas(window=1)
    made = scene.request("r1")
    work = next(e.record for e in made if isinstance(e, Dispatch))
    assert isinstance(work, Work)
    box.put(made, lane, lane.open(lambda: acked.append("r1"), len(made)))
    await box.drain()
    assert [topic for topic, *_ in producer.sent] == ["decisions", "phases"]
    assert acked == ["r1"] and not task.done()
    task.cancel()
    (phase,) = [record for _, record, *_ in producer.sent if isinstance(record, Phase)]
    assert (phase.kind, phase.attempt, phase.worker_id) == (PhaseKind.FAILED, 1, work.worker_id)
    scene.workers[work.worker_id].holds.clear()  # it never had it
    (end,) = [e for e in scene.record(PhaseArrived(phase, PARTITION)) if isinstance(e, End)]
    assert end.outcome.kind is OutcomeKind.FAILED and end.outcome.error is not None
    assert end.outcome.error.code == "record_too_large"
    assert [e for e in scene.request("r2") if isinstance(e, Dispatch)], "its credit is free again"


async def test_what_is_about_no_worker_still_ends_the_router() -> None:
    scene = replicas(window=1)
    decisions = [e for e in scene.request("r1") if isinstance(e, Decide)]
    producer = SmallProducer(by_broker=False, kind=type(decisions[0].decision))
    box = outbox_of(producer)
    box.put(decisions)
    with pytest.raises(RecordTooLarge):
        await box.run()


async def test_a_request_that_leaves_no_room_is_buried_and_the_router_goes_on() -> None:
    """Gateways accept none; whoever else writes one does not stop the partition."""
    process, producer = await process_with_partition()
    outbox = asyncio.create_task(process.outbox.run())
    good = builders.request("good", 4)
    huge = replace(good, request_id="huge", prompt_tokens=bytes(REQUEST_BYTES_MAX))
    named = replace(good, request_id="n" * 100_000)
    for offset, record in enumerate((huge, named, good)):
        event = FakeEvent(Codec().encode(record), offset)
        await process.take("requests", event)
        await until(lambda: event.acks == [offset])  # noqa: B023  # awaited in the same turn
    buried = [dict(headers) for topic, *_, headers in producer.sent if topic.endswith(".dlq")]
    assert [headers["x-dlq-error-class"] for headers in buried] == [b"RecordTooLarge"] * 2
    (outcome,) = [r for topic, r, *_ in producer.sent if topic == "outcomes"]
    assert outcome.request_id == "good", "its deadline was in the past"
    outbox.cancel()


def test_errors_of_workers_are_clipped_before_they_travel_on() -> None:
    scene = replicas(window=1, attempts_max=1)
    (work,) = [e.record for e in scene.request("r1") if isinstance(e, Dispatch)]
    assert isinstance(work, Work)
    error = WireError(code="engine_failed", message="x" * 500_000, retriable=True)
    (end,) = [e for e in scene.phase(work, PhaseKind.FAILED, error=error) if isinstance(e, End)]
    assert end.outcome.error is not None
    assert len(end.outcome.error.message) == MESSAGE_CHARS_MAX


async def test_a_report_whose_numbers_mean_nothing_is_buried_and_the_router_goes_on() -> None:
    """A transfer of NaN ms stopped it: the simulator's seeds found that (issue 10, 24)."""
    process, producer = await process_with_partition()
    scene = replicas(window=1)
    (work,) = [e.record for e in scene.request("r1") if isinstance(e, Dispatch)]
    assert isinstance(work, Work)
    phase = builders.phase(work, PhaseKind.KV_RECEIVED, transfer_ms=float("nan"))
    event = FakeEvent(Codec().encode(phase))
    await process.take("phases", event)
    assert event.acks == [0]
    ((topic, *_),) = producer.sent
    assert topic.endswith(".dlq")
