"""The share of decode time that searches cost, as heartbeats tell it."""

from typing import cast

from workers.llm.probing.jobs import ProbingJobs
from workers.presence import StalledShare


class Figures:
    """What `ProbingJobs` counts."""

    stalled_ms = 0.0
    asked_total = 0
    answers = 0

    def __len__(self) -> int:
        return self.answers


def test_stalled_share_is_none_without_probing_answers() -> None:
    figures = Figures()
    share = StalledShare(cast(ProbingJobs, figures), 3.0)
    assert [share.sample(float(now), 2) for now in range(3)] == [None] * 3
    figures.answers = 1
    assert share.sample(3.0, 2) == 0.0


def test_stalled_share_averages_all_answers_over_window() -> None:
    figures = Figures()
    share = StalledShare(cast(ProbingJobs, figures), 3.0)
    share.sample(0.0, 4)
    figures.asked_total, figures.stalled_ms = 1, 200.0
    assert share.sample(1.0, 4) == 200 / 4_000
    assert share.sample(2.0, 4) == 200 / 8_000
    assert share.sample(3.0, 4) == 200 / 12_000
    assert share.sample(4.0, 0) is None  # what was asked is longer ago
