"""Reports that are too large to travel: what a worker says instead."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from schemas.errors import RecordTooLarge
from schemas.records import Outcome, OutcomeKind, Phase, PhaseKind
from schemas.rules.sizes import NAME_CHARS_MAX, REPORT_BYTES_MAX
from tests.schemas.examples import example
from tests.virtual_time import virtual
from tests.workers.fakes import FakeLog, FakeProducer, handle
from workers.outbox import GATHER_S, ReportOutbox

HUGE = replace(handle(1), params=bytes(REPORT_BYTES_MAX))


async def wait_for_standing_lease() -> None:
    """Return at once, as where the lease stands."""


async def written_records(*records: Phase | Outcome) -> list[Any]:
    """Return what an outbox writes of these records."""
    log = FakeLog()
    producer = FakeProducer(log)
    await producer.start()
    outbox = ReportOutbox(producer, wait_for_standing_lease)  # type: ignore[arg-type]  # a fake
    for record in records:
        outbox.add(record)
    sending = asyncio.ensure_future(outbox.run())
    flushed = asyncio.ensure_future(outbox.wait_flushed())
    await asyncio.wait([sending, flushed], return_when=asyncio.FIRST_COMPLETED)
    flushed.cancel()
    if sending.done():
        sending.result()
    sending.cancel()
    return [record for *_, record, _ in log.sends]


async def test_outbox_waits_while_lease_is_doubtful() -> None:
    """A fenced worker must not write an outcome beside the next attempt's."""
    log, lease_request, leased = FakeLog(), asyncio.Event(), asyncio.Event()
    producer = FakeProducer(log)
    await producer.start()

    async def wait_for_lease() -> None:
        lease_request.set()
        await leased.wait()

    outbox = ReportOutbox(producer, wait_for_lease)  # type: ignore[arg-type]  # a fake
    outbox.add(replace(example("trivium.Outcome"), kv=None))
    sending = asyncio.ensure_future(outbox.run())
    flushed = asyncio.ensure_future(outbox.wait_flushed())
    await asyncio.wait(
        [flushed, asyncio.ensure_future(lease_request.wait())], return_when="FIRST_COMPLETED"
    )
    assert log.sends == []
    leased.set()
    await flushed
    assert len(log.sends) == 1
    sending.cancel()


@virtual
async def test_outbox_batches_outcomes_but_not_phases() -> None:
    """One write per outcome would cost the log and a router a request each."""
    log, loop = FakeLog(), asyncio.get_running_loop()
    producer = FakeProducer(log)
    await producer.start()
    outbox = ReportOutbox(producer, wait_for_standing_lease)  # type: ignore[arg-type]  # a fake
    sending = asyncio.ensure_future(outbox.run())
    outcome, phase = replace(example("trivium.Outcome"), kv=None), example("trivium.Phase")
    began_s = loop.time()
    outbox.add(outcome)
    await asyncio.sleep(0)
    outbox.add(outcome)
    await asyncio.sleep(0)
    assert log.sends == []
    await outbox.wait_flushed()
    assert len(log.sends) == 2
    assert loop.time() == pytest.approx(began_s + GATHER_S)
    outbox.add(outcome)
    outbox.add(phase)  # which stands behind it
    await outbox.wait_flushed()
    assert loop.time() == pytest.approx(began_s + GATHER_S)
    assert [type(record) for *_, record, _ in log.sends[2:]] == [Outcome, Phase]
    outbox.add(example("trivium.Outcome"))  # the next turn may use its KV
    await outbox.wait_flushed()
    assert loop.time() == pytest.approx(began_s + GATHER_S)
    sending.cancel()


async def test_outbox_drops_oversized_handle_of_report() -> None:
    """Reports are limited in size because later work repeats their handles."""
    phase = replace(example("trivium.Phase"), kind=PhaseKind.PREFILL_DONE, error=None, kv=HUGE)
    outcome = replace(example("trivium.Outcome"), kind=OutcomeKind.COMPLETED, error=None, kv=HUGE)
    failed, completed = await written_records(phase, outcome)
    assert (failed.kind, failed.kv) == (PhaseKind.FAILED, None)
    assert failed.error is not None and failed.error.code == "record_too_large"
    assert completed == replace(outcome, kv=None)


async def test_outbox_fails_when_report_without_handle_is_oversized() -> None:
    phase = replace(example("trivium.Phase"), request_id="r" * (NAME_CHARS_MAX + 1))
    with pytest.raises(RecordTooLarge):
        await written_records(phase)
