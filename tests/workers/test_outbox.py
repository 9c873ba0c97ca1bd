"""Reports that are too large to travel: what a worker says instead."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from schemas.errors import RecordTooLarge
from schemas.records import Outcome, OutcomeKind, Phase, PhaseKind
from schemas.rules.sizes import NAME_CHARS_MAX, REPORT_BYTES_MAX
from tests.schemas.examples import example
from tests.virtual import virtual
from tests.workers.fakes import FakeLog, FakeProducer, handle
from workers.outbox import GATHER_S, ReportOutbox

HUGE = replace(handle(1), params=bytes(REPORT_BYTES_MAX))


async def standing() -> None:
    """The lease stands."""


async def sent(*records: Phase | Outcome) -> list[Any]:
    """What an outbox writes of these."""
    log = FakeLog()
    producer = FakeProducer(log)
    await producer.start()
    outbox = ReportOutbox(producer, standing, pending_max=9, tries_max=1)  # type: ignore[arg-type]  # a fake
    for record in records:
        outbox.add(record)
    sending = asyncio.ensure_future(outbox.run())
    flushed = asyncio.ensure_future(outbox.wait_flushed())
    await asyncio.wait([sending, flushed], return_when=asyncio.FIRST_COMPLETED)
    flushed.cancel()
    if sending.done():
        sending.result()
    sending.cancel()
    return [record for *_, record, _ in log.sent]


async def test_nothing_is_said_while_the_lease_is_in_doubt() -> None:
    """A fenced worker's outcome was written beside the next attempt's."""
    log, asked, leased = FakeLog(), asyncio.Event(), asyncio.Event()
    producer = FakeProducer(log)
    await producer.start()

    async def wait_for_lease() -> None:
        asked.set()
        await leased.wait()

    outbox = ReportOutbox(producer, wait_for_lease, pending_max=9, tries_max=1)  # type: ignore[arg-type]  # a fake
    outbox.add(replace(example("trivium.Outcome"), kv=None))
    sending = asyncio.ensure_future(outbox.run())
    flushed = asyncio.ensure_future(outbox.wait_flushed())
    await asyncio.wait(
        [flushed, asyncio.ensure_future(asked.wait())], return_when="FIRST_COMPLETED"
    )
    assert log.sent == []
    leased.set()
    await flushed
    assert len(log.sent) == 1
    sending.cancel()


@virtual
async def test_outcomes_leave_together_and_no_phase_waits_for_them() -> None:
    """Each for itself cost its writer, the log and a router a request more."""
    log, loop = FakeLog(), asyncio.get_running_loop()
    producer = FakeProducer(log)
    await producer.start()
    outbox = ReportOutbox(producer, standing, pending_max=9, tries_max=1)  # type: ignore[arg-type]  # a fake
    sending = asyncio.ensure_future(outbox.run())
    outcome, phase = replace(example("trivium.Outcome"), kv=None), example("trivium.Phase")
    began_s = loop.time()
    outbox.add(outcome)
    await asyncio.sleep(0)
    outbox.add(outcome)
    await asyncio.sleep(0)
    assert log.sent == []
    await outbox.wait_flushed()
    assert len(log.sent) == 2
    assert loop.time() == pytest.approx(began_s + GATHER_S)
    outbox.add(outcome)
    outbox.add(phase)  # which stands behind it
    await outbox.wait_flushed()
    assert loop.time() == pytest.approx(began_s + GATHER_S)
    assert [type(record) for *_, record, _ in log.sent[2:]] == [Outcome, Phase]
    outbox.add(example("trivium.Outcome"))  # the next turn may use its KV
    await outbox.wait_flushed()
    assert loop.time() == pytest.approx(began_s + GATHER_S)
    sending.cancel()


async def test_a_handle_that_is_too_large_costs_its_request_and_not_the_worker() -> None:
    """Reports are bounded, because their handles travel on with work."""
    phase = replace(example("trivium.Phase"), kind=PhaseKind.PREFILL_DONE, error=None, kv=HUGE)
    outcome = replace(example("trivium.Outcome"), kind=OutcomeKind.COMPLETED, error=None, kv=HUGE)
    failed, completed = await sent(phase, outcome)
    assert (failed.kind, failed.kv) == (PhaseKind.FAILED, None)
    assert failed.error is not None and failed.error.code == "record_too_large"
    assert completed == replace(outcome, kv=None)


async def test_a_report_that_is_too_large_without_its_handle_ends_the_worker() -> None:
    phase = replace(example("trivium.Phase"), request_id="r" * (NAME_CHARS_MAX + 1))
    with pytest.raises(RecordTooLarge):
        await sent(phase)
