"""Invariant 2, from the router's side: an attempt number is never used twice.

Uses records alone. A router that dies may leave work in the log without its decision, and one that
slept may assume that it still owns its requests; clients would see neither.
"""

from infra.simulator.cluster import Checker
from schemas.records import Decision, DecisionKind, Usage, Work, WorkPhase

_Life = tuple[str, int]  # worker and epoch
_PLACING = (DecisionKind.PLACE, DecisionKind.REPLACE)


class AttemptNumbers(Checker):
    """Work of an attempt goes to one worker per phase, and attempt numbers only grow."""

    def __init__(self) -> None:
        self._at: dict[tuple[str, int, WorkPhase], _Life] = {}
        self._decided_attempts: dict[str, int] = {}  # the highest attempt with a decision
        self._work_attempts: dict[str, int] = {}  # the highest attempt with work

    def on_record(self, topic: str, record: object, now_ms: float) -> None:
        """Check the attempt numbers of work, decisions and usage."""
        if isinstance(record, Work):
            self._work(record)
        elif isinstance(record, Decision) and record.kind in _PLACING:
            last = self._decided_attempts.get(record.request_id, 0)
            name = f"{record.request_id}: attempt {record.attempt}"
            assert record.attempt > last, f"{name} is placed after attempt {last}"
            self._decided_attempts[record.request_id] = record.attempt
        elif isinstance(record, Usage):
            last, name = self._work_attempts.get(record.request_id, 0), record.request_id
            assert record.attempt >= last, f"{name}: ended by attempt {record.attempt}, void"

    def _work(self, work: Work) -> None:
        name = f"{work.request_id}: attempt {work.attempt}"
        last = self._work_attempts.get(work.request_id, 0)
        assert work.attempt >= last, f"{name} is given out after attempt {last}"
        self._work_attempts[work.request_id] = work.attempt
        life = work.worker_id, work.worker_epoch
        first_life = self._at.setdefault((work.request_id, work.attempt, work.phase), life)
        assert first_life == life, f"{name} is given to {first_life} and to {life}"
