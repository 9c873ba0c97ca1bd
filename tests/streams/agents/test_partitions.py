"""Records of partitions that a router owns: held back, applied, acknowledged or buried."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from schemas.codec import Codec
from schemas.log.clock import wall_ms
from schemas.records import (
    PhaseKind,
    Session,
    Work,
)
from schemas.rules.sizes import REQUEST_BYTES_MAX
from streams.agents import partitions as partitions_module
from streams.agents.partitions import Gate
from streams.core.effects import Dispatch
from streams.core.events import PartitionReady, PartitionTaken
from tests.streams import builders
from tests.streams.agents.fakes import (
    CODEC,
    FakeEvent,
    router_with_partition,
)
from tests.streams.core.router_setups import replicas
from tests.waiting import run, until


def test_the_gate_opens_turns_away_and_holds_back() -> None:
    async def main() -> None:
        gate = Gate()
        waiting = [asyncio.create_task(gate.passes(p)) for p in (0, 1, 2)]
        await asyncio.sleep(0)
        gate.keep({0, 1})
        gate.open(0)
        assert await waiting[0] and not await waiting[2]
        assert await gate.passes(0)
        gate.close()
        assert not await waiting[1]
        late = asyncio.create_task(gate.passes(0))
        await asyncio.sleep(0)
        assert not late.done()
        gate.open(0)
        assert await late
        gate.open(7)
        assert await gate.passes(7)

    run(main())


def test_garbage_is_buried_before_it_is_acknowledged() -> None:
    async def main() -> None:
        partitions, producer = await router_with_partition()
        producer.at_once = False
        event = FakeEvent(b"garbage", headers={"h": b"v"})
        taking = asyncio.create_task(partitions.take("requests", event))
        await until(lambda: len(producer.acks) == 1)
        assert event.acks == []
        producer.acks[0].set_result(None)
        await taking
        assert event.acks == [0]
        topic, value, _, _, headers = producer.sent[0]
        assert (topic, value) == ("test.requests.dlq", b"garbage")
        assert ("h", b"v") in headers

    run(main())


def test_a_record_that_was_rebuilt_is_acknowledged_and_not_applied_again() -> None:
    async def main() -> None:
        partitions, _ = await router_with_partition()
        process = partitions.process
        partitions.group.next_offsets["requests", 0] = 5
        deadline_ms = wall_ms() + 60_000
        value = process.codec.encode(builders.request("r1", deadline_ms=deadline_ms))
        old, fresh = FakeEvent(value, offset=4), FakeEvent(value, offset=5)
        await partitions.take("requests", old)
        assert old.acks == [4] and not process.router.view()
        await partitions.take("requests", fresh)
        assert fresh.acks == [5] and process.router.view()
        assert partitions.group.next_offsets["requests", 0] == 6

    run(main())


async def test_a_request_that_leaves_no_room_is_buried_and_the_router_goes_on() -> None:
    """Gateways accept none; whoever else writes one does not stop the partition."""
    partitions, producer = await router_with_partition()
    process = partitions.process
    outbox = asyncio.create_task(process.outbox.run())
    good = builders.request("good", 4)
    huge = replace(good, request_id="huge", prompt_tokens=bytes(REQUEST_BYTES_MAX))
    named = replace(good, request_id="n" * 100_000)
    for offset, record in enumerate((huge, named, good)):
        event = FakeEvent(Codec().encode(record), offset)
        await partitions.take("requests", event)
        await until(lambda: event.acks == [offset])  # noqa: B023  # awaited in the same turn
    buried = [dict(headers) for topic, *_, headers in producer.sent if topic.endswith(".dlq")]
    assert [headers["x-dlq-error-class"] for headers in buried] == [b"RecordTooLarge"] * 2
    (outcome,) = [r for topic, r, *_ in producer.sent if topic == "outcomes"]
    assert outcome.request_id == "good", "its deadline was in the past"
    outbox.cancel()


async def test_a_report_whose_numbers_mean_nothing_is_buried_and_the_router_goes_on() -> None:
    """A transfer of NaN ms stopped it: the simulator's seeds found that."""
    partitions, producer = await router_with_partition()
    scene = replicas(window=1)
    (work,) = [e.record for e in scene.request("r1") if isinstance(e, Dispatch)]
    assert isinstance(work, Work)
    phase = builders.phase(work, PhaseKind.KV_RECEIVED, transfer_ms=float("nan"))
    event = FakeEvent(Codec().encode(phase))
    await partitions.take("phases", event)
    assert event.acks == [0]
    ((topic, *_),) = producer.sent
    assert topic.endswith(".dlq")


def test_a_rebuild_that_is_given_up_has_closed_what_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its connections would outlive the router, or be read from beside the next rebuild's."""
    reading, closed = asyncio.Event(), asyncio.Event()

    async def past(*_: object, **__: object) -> AsyncIterator[Any]:
        try:
            reading.set()
            yield await asyncio.Event().wait()
        finally:
            for _turn in range(9):
                await asyncio.sleep(0)
            closed.set()

    async def main() -> None:
        partitions, _ = await router_with_partition()
        process = partitions.process
        sending = asyncio.create_task(process.outbox.run())
        partitions.on_assigned({("requests", 0), ("requests", 1)})
        await reading.wait()
        await partitions.on_revoked()
        sending.cancel()
        assert closed.is_set() and not process.router.owned

    monkeypatch.setattr(partitions_module, "past_records", past)
    run(main())


def test_a_rebuild_counts_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the watchdog would take a long one for a stuck consumer."""

    async def past(*_: object, **__: object) -> AsyncIterator[Any]:
        for offset in range(3):
            value = codec.encode(builders.request(f"r{offset}"))
            yield "requests", FakeEvent(value, offset)
            counts.append(made[0].group.records_read)
        yield "requests", FakeEvent(b"garbage", 3)
        yield "sessions", FakeEvent(None)

    async def main() -> None:
        partitions, _ = await router_with_partition()
        process = partitions.process
        made.append(partitions)
        process.apply(PartitionTaken(1), "taken", 1, 0)
        await partitions._rebuild([1])
        assert partitions.group.records_read == 5

    codec, counts, made = Codec(), list[int](), list[Any]()
    monkeypatch.setattr(partitions_module, "past_records", past)
    run(main())
    assert counts == [1, 2, 3]


def test_a_rebuild_takes_the_last_word_of_each_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An hour has many records of each, and one that was forgotten stays so."""

    def said(session_id: str, turns: int) -> FakeEvent:
        session = Session(
            session_id=session_id, decode_worker="x0", worker_epoch=1, context_tokens=9,
            turns=turns, last_used_ms=wall_ms(),
        )  # fmt: skip
        return keyed(session_id, CODEC.encode(session))

    def keyed(session_id: str, value: bytes | None) -> FakeEvent:
        event = FakeEvent(value)
        event.partition, event.key = 1, session_id.encode()
        return event

    async def past(*_: object, **__: object) -> AsyncIterator[Any]:
        for event in (said("a", 1), said("b", 1), said("a", 2), keyed("b", None)):
            yield "sessions", event

    async def main() -> None:
        partitions, _ = await router_with_partition()
        process = partitions.process
        process.apply(PartitionTaken(1), "taken", 1, 0)
        process.journal.cut(1)
        await partitions._rebuild([1])
        (batch,) = process.journal.cut(1)
        assert batch.topics == ("sessions",)
        process.apply(PartitionReady(1), "ready", 1, 0)
        assert {n: s.turns for n, s in process.router.tables.sessions.all().items()} == {
            ("", "a"): 2
        }

    monkeypatch.setattr(partitions_module, "past_records", past)
    run(main())
