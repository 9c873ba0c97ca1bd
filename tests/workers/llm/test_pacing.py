"""When frames leave, with plain calls."""

import pytest

from tests.workers.fakes import WORKER
from workers.llm.frames import Frames
from workers.llm.pacing import Due, Intervals, Pacing

MANY = [f"r{number}" for number in range(5)]


class Sending:
    """Frames of one gateway partition and their pacing."""

    def __init__(self, at_once_max: int = 2) -> None:
        self.frames = Frames(WORKER)
        intervals = Intervals(shortest_ms=10, longest_ms=32, at_once_max=at_once_max)
        self.pacing = Pacing(self.frames, intervals)

    def later(self, *names: str, seq: int = 1) -> None:
        """A token each, none of them the first."""
        for name in names:
            self.frames.columns(0).row(name, 1, seq, seq, [7], "a")

    def leaves(self, now_ms: float, request_count: int = 5, *, at_once: bool = False) -> list[str]:
        """Whose tokens leave at that time."""
        due = self.pacing.due(now_ms, request_count, at_once=at_once)
        batches = [] if due is None else self.pacing.take(due, 0)
        return [name for batch in batches for name in batch.frame.request_ids]


def test_pacing_has_nothing_due_without_frames() -> None:
    sending = Sending()
    assert sending.pacing.due(0.0, 0) is None and sending.pacing.is_settled


def test_pacing_waits_for_acknowledgement_of_last_frame() -> None:
    sending = Sending()
    sending.later("a")
    assert sending.leaves(0.0) == ["a"] and not sending.pacing.is_settled
    sending.later("a", seq=2)
    assert sending.leaves(1.0) == []
    sending.pacing.mark_acknowledged(0)
    assert sending.leaves(2.0) == ["a"]
    sending.pacing.mark_acknowledged(0)
    assert sending.pacing.is_settled


@pytest.mark.parametrize(("request_count", "interval_ms"), [(5, 10.0), (128, 20.0), (1_000, 32.0)])
def test_pacing_delays_later_tokens_of_many_streams(request_count: int, interval_ms: float) -> None:
    """The interval grows with the number of active requests."""
    sending = Sending()
    sending.later(*MANY)
    assert sending.leaves(100.0, request_count) == MANY
    sending.pacing.mark_acknowledged(0)
    sending.later(*MANY, seq=2)
    assert sending.leaves(101.0, request_count) == []
    assert sending.pacing.alarm_ms == 100.0 + interval_ms
    assert sending.leaves(100.0 + interval_ms, request_count) == MANY


def test_pacing_sends_urgent_rows_alone_during_interval() -> None:
    sending = Sending()
    sending.later(*MANY)
    sending.leaves(0.0)
    sending.pacing.mark_acknowledged(0)
    sending.later(*MANY, seq=2)
    sending.later("new", seq=0)
    assert sending.pacing.due(1.0, 6) is Due.URGENT
    assert sending.leaves(1.0, 6) == ["new"]
    sending.pacing.mark_acknowledged(0)
    assert sending.leaves(1.0, 6) == [] and sending.leaves(1.0, 6, at_once=True) == MANY


def test_pacing_never_delays_few_streams() -> None:
    sending = Sending(at_once_max=5)
    for number in range(1, 4):
        sending.later(*MANY, seq=number)
        assert sending.leaves(float(number)) == MANY
        sending.pacing.mark_acknowledged(0)
    assert sending.pacing.alarm_ms is None
