"""What heartbeats tell of what a process cannot do: since when, how long, and for whom."""

import asyncio
import struct
import time
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.fleet import FleetView
from schemas.records import Faults, Heartbeat, Load, MemberKind, MemberState, Registration
from schemas.settings import LogSettings
from streams.log.cancellation import cancel_and_wait
from streams.log.clients import AssignedReader, LogProducer, send_dead_letter
from streams.log.membership import Membership
from streams.log.reading.faults import FAULTS, ProcessFaults
from tests.streams.log.reading.odd_batches import batch, produce_batch, segment_of
from tests.waits import until


def test_faults_report_failure_until_recovery_or_expiry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    of = ProcessFaults()
    assert of.record() is None
    of.note_failing("rows[0]", "cannot be read")
    of.note_failing("rows[1]", "cannot be read")
    of.note_failing("rows[1]", "not leased")
    assert of.record() == Faults(failing="rows[0]: cannot be read; rows[1]: not leased")
    assert of.why_failing("rows[1]") == "not leased"
    of.note_working("rows[1]")
    assert (of.why_failing("rows[1]"), of.problem) == ("", "rows[0]: cannot be read")
    now_s += 61
    assert (of.why_failing("rows[0]"), of.problem, of.record()) == ("", "", None)


def test_faults_count_unreadable_record_once_and_bound_text() -> None:
    of = ProcessFaults()
    for offset in (7, 7, 9):
        of.note_unreadable("rows", 0, offset, "x" * 5_000)
    for number in range(200):
        of.note_failing(f"rows[{number}]", "y" * 5_000)
    record = of.record()
    assert record is not None and record.unreadable_total == 2
    assert record.unreadable.startswith("rows[0]@9: xxx")
    assert len(record.unreadable) == len(record.failing) == 1_000


def test_view_shows_ready_member_with_fault_as_failing() -> None:
    view = FleetView()
    heartbeat = Heartbeat(
        member_id="a", epoch=1, seq=1, at_ms=1, state=MemberState.READY, grants=(), load=Load()
    )
    registration = Registration(
        member_id="a", epoch=1, kind=MemberKind.ROUTER, roles=(), leases=(), host="h", pid=1,
        url="", started_ms=1,
    )  # fmt: skip
    view.apply(registration, 0, 1)
    for state, faults_now, condition in (
        (MemberState.READY, None, "ready"),
        (MemberState.READY, Faults(unreadable_total=1, unreadable="rows[0]@1: torn"), "ready"),
        (MemberState.READY, Faults(failing="rows[0]: cannot be read"), "failing"),
        (MemberState.DRAINING, Faults(failing="rows[0]: cannot be read"), "draining"),
    ):
        heartbeat = replace(heartbeat, seq=heartbeat.seq + 1, state=state, faults=faults_now)
        view.apply(heartbeat, heartbeat.seq, 2)
        assert view.members["a"].condition == condition


@pytest.mark.kafka
async def test_heartbeat_names_partition_that_broker_cannot_serve(
    kafka: LogSettings, broker_folder: Path
) -> None:
    """aiokafka only logs the failure and retries for ever."""
    place = f"{kafka.topic_prefix}prompts[0]"
    reader = AssignedReader(kafka, "prompts", [0], client_id="reader")
    for value in (b"first", b"damaged", b"last"):
        await produce_batch(kafka, "prompts", batch([value]))
    file = segment_of(broker_folder, kafka, "prompts")
    size = len(batch([b"first"]))
    with file.open("r+b") as segment:
        segment.seek(size + 8)
        segment.write(struct.pack(">i", -7))  # its length
    async with reader.reading({0: 1}):
        reading = asyncio.create_task(reader.batch())
        await until(lambda: bool(FAULTS.why_failing(place)) or reading.done())
        await cancel_and_wait(reading)
    async with LogProducer(kafka, Codec(), durable=True, client_id="m") as producer:
        member = Membership(kafka, Codec(), producer, member_id="m", kind=MemberKind.WORKER)
        await member.join()
        await member.leave()
        FAULTS.note_working(place)
    beats = AssignedReader(kafka, "fleet", [0], client_id="watch")
    async with beats.reading("earliest"):
        records = [Codec().decode(record.value) for record in await beats.read_to_end()]
    fault_records = [record.faults for record in records if isinstance(record, Heartbeat)]
    assert fault_records and all(
        faults is not None and place in faults.failing for faults in fault_records
    )


@pytest.mark.kafka
async def test_faults_count_dead_lettered_record_once(kafka: LogSettings) -> None:
    before = FAULTS.record() or Faults()
    async with LogProducer(kafka, Codec(), durable=True, client_id="m") as producer:
        reader = AssignedReader(kafka, "prompts", [0], client_id="reader")
        await produce_batch(kafka, "prompts", batch([b"odd"]))
        async with reader.reading("earliest"):
            (record,) = await reader.read_to_end()
            for _ in range(2):
                await send_dead_letter(producer, record, RecordError("nobody can mean this"))
    after = FAULTS.record()
    assert after is not None and after.unreadable_total == before.unreadable_total + 1
    assert after.unreadable == f"{kafka.topic_prefix}prompts[0]@0: nobody can mean this"
