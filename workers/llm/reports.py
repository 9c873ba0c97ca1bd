"""Phases and outcomes on their way to the log: what is sent next, and what where that fails.

Synchronous bookkeeping without clock and log. Records are sent in order, without awaiting each
acknowledgement; one that was not taken is sent again after a pause, and after all tries the worker
gives up, whose requests are then placed elsewhere. Sending twice is harmless. `workers/outbox.py`
sends, and so does the simulator.
"""

from collections import deque
from dataclasses import dataclass, replace

from schemas.errors import BrokerUnavailable, RecordTooLarge
from schemas.log.clients import Headers
from schemas.records import Outcome, Phase, PhaseKind, Retrieved
from schemas.rules.outcomes import outcome_key

RETRY_MS = 100  # times the tries so far


@dataclass(slots=True, eq=False)
class PendingReport:
    """One record; its tries are counted here."""

    record: Phase | Outcome | Retrieved
    headers: Headers
    tries: int = 0

    @property
    def address(self) -> tuple[str, str]:
        """Its topic and key; the partition is the session's."""
        if isinstance(self.record, Outcome):
            return "outcomes", outcome_key(self.record)
        return "phases", self.record.session_id


class Reports:
    """The queue; a report is pending from `add` until it is acknowledged."""

    def __init__(self, *, pending_max: int, tries_max: int) -> None:
        self.fatal_error: BrokerUnavailable | None = None
        self._pending_max, self._tries_max = pending_max, tries_max
        self._queue: deque[PendingReport] = deque()
        self._pending = 0

    def __len__(self) -> int:
        """Return the number of pending reports."""
        return self._pending

    @property
    def has_space(self) -> bool:
        """Return whether fewer reports are pending than may be; only then begins new work."""
        return self._pending < self._pending_max

    def add(self, record: Phase | Outcome | Retrieved, headers: Headers) -> None:
        """Append a record to the queue."""
        self._pending += 1
        self._queue.append(PendingReport(record, headers))

    @property
    def is_due(self) -> bool:
        """Whether `next` has one to send."""
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
        """Say instead what can travel, in the same place; raises the error where nothing can."""
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
    """What is said where a handle is too large to travel: no KV is kept for the next turn, or the
    attempt failed.
    """
    if isinstance(record, Outcome):
        return replace(record, kv=None)
    return replace(record, kind=PhaseKind.FAILED, kv=None, error=error.to_wire())
