"""Phases and outcomes on their way, with plain calls."""

from dataclasses import replace

import pytest

from schemas.errors import BrokerUnavailable, RecordTooLarge
from schemas.rules.outcomes import outcome_key
from tests.schemas.examples import example
from workers.llm.reports import RETRY_MS, Reports

PHASE, OUTCOME = example("trivium.Phase"), example("trivium.Outcome")


def reports(pending_max: int = 2, tries_max: int = 2) -> Reports:
    return Reports(pending_max=pending_max, tries_max=tries_max)


def test_reports_keep_order_and_go_to_their_topics() -> None:
    queue = reports()
    queue.add(PHASE, ())
    queue.add(OUTCOME, ())
    assert queue.next().address == ("phases", PHASE.session_id)
    assert queue.next().address == ("outcomes", outcome_key(OUTCOME))
    assert not queue.is_due and len(queue) == 2


def test_retrieved_record_goes_to_its_session_and_never_shrinks() -> None:
    queue, record = reports(), example("trivium.Retrieved")
    queue.add(record, ())
    report = queue.next()
    assert report.address == ("phases", record.session_id)
    with pytest.raises(RecordTooLarge):
        queue.shrink(report, RecordTooLarge("no"))


def test_pending_reports_leave_no_space_for_work() -> None:
    queue = reports(pending_max=2)
    for number in range(2):
        assert queue.has_space
        queue.add(replace(PHASE, request_id=str(number)), ())
    assert not queue.has_space
    queue.mark_acknowledged(queue.next())
    assert queue.has_space


def test_report_retries_with_growing_pauses_then_fails() -> None:
    queue = reports(tries_max=3)
    queue.add(PHASE, ())
    for tries in (1, 2):
        report = queue.next()
        assert queue.record_failure(report, OSError("no")) == tries * RETRY_MS
        assert not queue.is_due and queue.fatal_error is None
        queue.retry(report)
    assert queue.record_failure(queue.next(), OSError("no broker")) is None
    assert isinstance(queue.fatal_error, BrokerUnavailable)
    assert PHASE.request_id in queue.fatal_error.message and "3 tries: no broker" in str(
        queue.fatal_error
    )
