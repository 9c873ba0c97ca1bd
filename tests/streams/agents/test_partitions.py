"""Records of partitions that a router owns: held back, applied, acknowledged or buried."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from schemas.codec import Codec
from schemas.records import (
    PhaseKind,
    Session,
    Work,
)
from schemas.rules.sizes import REQUEST_BYTES_MAX
from streams.agents import partitions as partitions_module
from streams.agents.router import Gate
from streams.core.effects import Dispatch
from streams.core.events import PartitionReady, PartitionTaken
from streams.log.clock import wall_ms
from tests.streams import builders
from tests.streams.agents.fakes import (
    CODEC,
    FakeEvent,
    router_with_partition,
)
from tests.streams.core.router_setups import replicas
from tests.waits import run, until


def test_gate_passes_open_partitions_and_rejects_lost_ones() -> None:
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


def test_partitions_dead_letter_garbage_before_acknowledging() -> None:
    async def main() -> None:
        partitions, producer = await router_with_partition()
        producer.at_once = False
        event = FakeEvent(b"garbage", headers={"h": b"v"})
        taking = asyncio.create_task(partitions.process.take("requests", event))
        await until(lambda: len(producer.acks) == 1)
        assert event.acks == []
        producer.acks[0].set_result(None)
        await taking
        assert event.acks == [0]
        topic, value, _, _, headers = producer.sends[0]
        assert (topic, value) == ("test.requests.dlq", b"garbage")
        assert ("h", b"v") in headers

    run(main())


def test_partitions_acknowledge_rebuilt_record_without_applying() -> None:
    async def main() -> None:
        partitions, _ = await router_with_partition()
        process = partitions.process
        partitions.group.next_offsets["requests", 0] = 5
        deadline_ms = wall_ms() + 60_000
        value = process.codec.encode(builders.request("r1", deadline_ms=deadline_ms))
        old, fresh = FakeEvent(value, offset=4), FakeEvent(value, offset=5)
        await partitions.process.take("requests", old)
        assert old.acks == [4] and not process.router.view()
        await partitions.process.take("requests", fresh)
        assert fresh.acks == [5] and process.router.view()
        assert partitions.group.next_offsets["requests", 0] == 6

    run(main())


async def test_partitions_dead_letter_oversized_request_and_continue() -> None:
    """Gateways accept none; another writer's request must not stop the partition."""
    partitions, producer = await router_with_partition()
    process = partitions.process
    outbox = asyncio.create_task(process.outbox.run())
    good = builders.request("good", 4)
    huge = replace(good, request_id="huge", prompt_tokens=bytes(REQUEST_BYTES_MAX))
    long_named = replace(good, request_id="n" * 100_000)
    for offset, record in enumerate((huge, long_named, good)):
        event = FakeEvent(Codec().encode(record), offset)
        await partitions.process.take("requests", event)
        await until(lambda: event.acks == [offset])  # noqa: B023  # awaited in the same turn
    buried = [dict(headers) for topic, *_, headers in producer.sends if topic.endswith(".dlq")]
    assert [headers["x-dlq-error-class"] for headers in buried] == [b"RecordTooLarge"] * 2
    (outcome,) = [r for topic, r, *_ in producer.sends if topic == "outcomes"]
    assert outcome.request_id == "good", "its deadline was in the past"
    outbox.cancel()


async def test_partitions_dead_letter_report_with_nan() -> None:
    """A transfer of NaN ms stopped the router: the simulator's seeds found that."""
    partitions, producer = await router_with_partition()
    scene = replicas(window=1)
    (work,) = [e.record for e in scene.request("r1") if isinstance(e, Dispatch)]
    assert isinstance(work, Work)
    phase = builders.phase(work, PhaseKind.KV_RECEIVED, transfer_ms=float("nan"))
    event = FakeEvent(Codec().encode(phase))
    await partitions.process.take("phases", event)
    assert event.acks == [0]
    ((topic, *_),) = producer.sends
    assert topic.endswith(".dlq")


def test_rebuild_closes_reader_when_partitions_are_revoked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its connections would outlive the router or read beside the next rebuild."""
    reading, closed = asyncio.Event(), asyncio.Event()

    async def read_past(*_: object, **__: object) -> AsyncIterator[Any]:
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

    monkeypatch.setattr(partitions_module, "past_records", read_past)
    run(main())


def test_rebuild_counts_records_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the watchdog would take a long rebuild for a stuck consumer."""

    async def read_past(*_: object, **__: object) -> AsyncIterator[Any]:
        for offset in range(3):
            value = codec.encode(builders.request(f"r{offset}"))
            yield "requests", FakeEvent(value, offset)
            counts.append(owners[0].group.records_read)
        yield "requests", FakeEvent(b"garbage", 3)
        yield "sessions", FakeEvent(None)

    async def main() -> None:
        partitions, _ = await router_with_partition()
        process = partitions.process
        owners.append(partitions)
        process.apply(PartitionTaken(1), "taken", 1, 0)
        await partitions._rebuild([1])
        assert partitions.group.records_read == 5

    codec, counts, owners = Codec(), list[int](), list[Any]()
    monkeypatch.setattr(partitions_module, "past_records", read_past)
    run(main())
    assert counts == [1, 2, 3]


def test_rebuild_takes_last_record_of_each_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An hour has many records of each session, and a tombstone forgets one."""

    def session_event(session_id: str, turns: int) -> FakeEvent:
        session = Session(
            session_id=session_id, decode_worker="x0", worker_epoch=1, context_tokens=9,
            turns=turns, last_used_ms=wall_ms(),
        )  # fmt: skip
        return keyed(session_id, CODEC.encode(session))

    def keyed(session_id: str, value: bytes | None) -> FakeEvent:
        event = FakeEvent(value)
        event.partition, event.key = 1, session_id.encode()
        return event

    async def read_past(*_: object, **__: object) -> AsyncIterator[Any]:
        for event in (
            session_event("a", 1),
            session_event("b", 1),
            session_event("a", 2),
            keyed("b", None),
        ):
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

    monkeypatch.setattr(partitions_module, "past_records", read_past)
    run(main())
