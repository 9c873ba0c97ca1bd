"""A queue of phases and outcomes for the log: what is sent next, and what is done if that fails.

Synchronous bookkeeping without clock and log. Records are sent in order, without awaiting each
acknowledgement. A record that was not written is sent again after a pause. After all tries the
incarnation ends, and routers place its requests again. Sending twice is harmless.
`workers/outbox.py` and the simulator do the sending.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from schemas.errors import BrokerUnavailable, RecordTooLarge
from schemas.records import Outcome, Phase, PhaseKind, Retrieved
from schemas.rules.outcomes import outcome_key
from streams.log.clients import Headers

TRIES_MAX: Final = 5  # of one record: then the log is away, and others do the work
PENDING_MAX: Final = 1_024  # unacknowledged records; at this number a worker reads no new work
RETRY_MS = 100  # pause before a retry, times the number of tries so far


@dataclass(slots=True, eq=False)
class PendingReport:
    """One record to send, with the number of its tries."""

    record: Phase | Outcome | Retrieved
    headers: Headers
    tries: int = 0

    @property
    def address(self) -> tuple[str, str]:
        """Return the record's topic and key; its partition is that of the session."""
        if isinstance(self.record, Outcome):
            return "outcomes", outcome_key(self.record)
        return "phases", self.record.session_id


class Reports:
    """The queue; a report is pending from `add` until it is acknowledged."""

    def __init__(self, *, pending_max: int = PENDING_MAX, tries_max: int = TRIES_MAX) -> None:
        self.fatal_error: BrokerUnavailable | None = None
        self._pending_max, self._tries_max = pending_max, tries_max
        self._queue: deque[PendingReport] = deque()
        self._pending = 0

    def __len__(self) -> int:
        """Return the number of pending reports."""
        return self._pending

    @property
    def has_space(self) -> bool:
        """Return whether fewer than `pending_max` reports are pending, so new work may start."""
        return self._pending < self._pending_max

    def add(self, record: Phase | Outcome | Retrieved, headers: Headers) -> None:
        """Append a record to the queue."""
        self._pending += 1
        self._queue.append(PendingReport(record, headers))

    @property
    def is_due(self) -> bool:
        """Return whether `next` has a report to send."""
        return bool(self._queue)

    def next(self) -> PendingReport:
        """Take the next report to send, and count the try."""
        report = self._queue.popleft()
        report.tries += 1
        return report

    def mark_acknowledged(self, report: PendingReport) -> None:
        """Count a report as written to the log."""
        self._pending -= 1

    def shrink(self, report: PendingReport, error: RecordTooLarge) -> None:
        """Replace a record that is too large, in its place; raise the error if it has no KV."""
        if isinstance(report.record, Retrieved) or report.record.kv is None:
            raise error
        report.record = without_kv(report.record, error)
        self._queue.appendleft(report)

    def record_failure(self, report: PendingReport, error: BaseException) -> int | None:
        """Return after how many ms to `retry` a failed report; None after its last try."""
        if report.tries < self._tries_max:
            return RETRY_MS * report.tries
        record = report.record
        self.fatal_error = BrokerUnavailable(
            f"{type(record).__name__} of request {record.request_id} not sent after "
            f"{report.tries} tries: {error}"
        )
        return None

    def retry(self, report: PendingReport) -> None:
        """Queue a report again after its pause."""
        self._queue.append(report)


def without_kv(record: Phase | Outcome, error: RecordTooLarge) -> Phase | Outcome:
    """Return the record for a KV handle that is too large to send: an outcome without KV, or a
    phase of a failed attempt.
    """
    if isinstance(record, Outcome):
        return replace(record, kv=None)
    return replace(record, kind=PhaseKind.FAILED, kv=None, error=error.to_wire())
