"""What an intake counts; what it takes and answers is in `test_worker.py`."""

import pytest

from workers.retrieval.intake import TimeWeightedMean


def test_time_weighted_mean_restarts_when_taken() -> None:
    now_s = 0.0
    mean = TimeWeightedMean(lambda: now_s)
    assert mean.take_mean() == 0
    mean.set_value(4)
    now_s = 1.0
    mean.set_value(0)
    now_s = 2.0
    assert mean.take_mean() == pytest.approx(2)
    now_s = 3.0
    mean.set_value(3)
    now_s = 4.0
    assert mean.take_mean() == pytest.approx(1.5)
    now_s = 5.0
    assert mean.take_mean() == pytest.approx(3)
