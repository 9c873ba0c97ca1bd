"""Linear models that learn from a stream: changes, outliers, and what no news comes of."""

from random import Random

import pytest

from streams.core.placement.estimates import Regression


def feed(model: Regression, random: Random, count: int, factor: float = 1.0) -> None:
    for _ in range(count):
        x = (random.uniform(0.1, 5.0), 1.0, random.choice((0.0, random.uniform(0, 8))))
        model.observe(x, factor * (50 * x[0] + 20 + 30 * x[2]) * random.gauss(1.0, 0.1))


def error(model: Regression, factor: float = 1.0) -> float:
    """The greatest relative error over typical work."""
    points = [(size, 1.0, ahead) for size in (0.5, 1.0, 4.0) for ahead in (0.0, 5.0)]
    truths = [factor * (50 * x[0] + 20 + 30 * x[2]) for x in points]
    return max(abs(model.predict(x) / y - 1) for x, y in zip(points, truths, strict=True))


def test_regression_learns_and_follows_changes() -> None:
    random, model = Random(4), Regression((100.0, 1.0, 100.0), (300.0, 10.0, 300.0))
    feed(model, random, 200)
    assert error(model) < 0.2
    assert model.alarms == 0
    feed(model, random, 60, factor=2.0)
    assert error(model, 2.0) < 0.2
    assert model.alarms == 1
    feed(model, random, 60, factor=0.5)
    assert error(model, 0.5) < 0.25


def test_regression_resists_single_outliers() -> None:
    random, model = Random(5), Regression((100.0, 1.0, 100.0), (300.0, 10.0, 300.0))
    feed(model, random, 200)
    before = model.predict((1.0, 1.0, 0.0))
    model.observe((1.0, 1.0, 0.0), 100 * before)
    assert model.predict((1.0, 1.0, 0.0)) < 1.25 * before
    assert model.alarms == 0


def test_regression_stays_bounded_on_constant_input() -> None:
    model = Regression((100.0, 1.0), (300.0, 10.0))
    for _ in range(5_000):
        model.observe((1.0, 1.0), 70.0)
    assert model.predict((1.0, 1.0)) == pytest.approx(70.0, rel=0.01)
    assert all(abs(v) <= 300.0**2 for row in model._covariance for v in row)
    assert min(model.coefficients) >= 0.0


def test_regression_keeps_long_prompts_when_fed_short_ones() -> None:
    """Otherwise a first turn's time would be predicted from those of later turns."""
    random, model = Random(7), Regression((100.0, 1.0, 1.0), (300.0, 10.0, 1.0))

    def learn(count: int, longest: float) -> None:
        for _ in range(count):
            x = (random.uniform(0.05, longest), 1.0, random.uniform(0, 20))
            model.observe(x, (36 * x[0] + 12 + x[2]) * random.gauss(1.0, 0.2))

    learn(200, 4.0)
    for _ in range(20):
        learn(100, 0.1)
        assert model.predict((4.0, 1.0, 0.0)) == pytest.approx(156, rel=0.15)


def test_regression_learns_nothing_from_zero_features() -> None:
    model = Regression((100.0, 1.0), (300.0, 10.0))
    model.observe((0.0, 0.0), 70.0)
    assert (model.coefficients, model.samples) == ([100.0, 1.0], 1)


def test_regression_never_exceeds_initial_variance() -> None:
    """Small observations that are far off make it forget more than it learns."""
    random, model = Random(3), Regression((1.0, 1.0), (2.0, 3.0))
    for _ in range(500):
        model.observe((0.01, random.uniform(0.0, 0.01)), random.uniform(0.0, 20.0))
        assert all(model._covariance[i][i] <= (4.0, 9.0)[i] * (1 + 1e-9) for i in range(2))
        assert model._covariance[0][1] == pytest.approx(model._covariance[1][0])
