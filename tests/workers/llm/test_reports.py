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


def test_reports_leave_in_order_to_their_topics() -> None:
    found = reports()
    found.add(PHASE, ())
    found.add(OUTCOME, ())
    assert found.next().address == ("phases", PHASE.session_id)
    assert found.next().address == ("outcomes", outcome_key(OUTCOME))
    assert not found.is_due and len(found) == 2


def test_what_searches_found_goes_where_its_session_lies_and_must_fit() -> None:
    found, record = reports(), example("trivium.Retrieved")
    found.add(record, ())
    report = found.next()
    assert report.address == ("phases", record.session_id)
    with pytest.raises(RecordTooLarge):
        found.shrink(report, RecordTooLarge("no"))


def test_what_is_pending_leaves_no_room_for_new_work() -> None:
    found = reports(pending_max=2)
    for number in range(2):
        assert found.has_space
        found.add(replace(PHASE, request_id=str(number)), ())
    assert not found.has_space
    found.mark_acknowledged(found.next())
    assert found.has_space


def test_a_report_that_fails_is_sent_again_after_growing_pauses_and_then_given_up() -> None:
    found = reports(tries_max=3)
    found.add(PHASE, ())
    for tries in (1, 2):
        report = found.next()
        assert found.record_failure(report, OSError("no")) == tries * RETRY_MS
        assert not found.is_due and found.fatal_error is None
        found.retry(report)
    assert found.record_failure(found.next(), OSError("no broker")) is None
    assert isinstance(found.fatal_error, BrokerUnavailable)
    assert PHASE.request_id in found.fatal_error.message and "3 tries: no broker" in str(
        found.fatal_error
    )
