"""What is learned of times: models, paces, hops, and what it is worth when notes are missing."""

from random import Random

import pytest

from schemas.records import Mode, Orchestration
from streams.config import RouterSettings
from streams.core import estimates
from streams.core.estimates import Estimates
from streams.core.regression import Regression
from tests.streams.placing import need, pair, session
from tests.streams.placing_world import Laws, world


def feed(model: Regression, random: Random, count: int, factor: float = 1.0) -> None:
    for _ in range(count):
        x = (random.uniform(0.1, 5.0), 1.0, random.choice((0.0, random.uniform(0, 8))))
        model.observe(x, factor * (50 * x[0] + 20 + 30 * x[2]) * random.gauss(1.0, 0.1))


def error(model: Regression, factor: float = 1.0) -> float:
    """The greatest relative error over typical work."""
    points = [(size, 1.0, ahead) for size in (0.5, 1.0, 4.0) for ahead in (0.0, 5.0)]
    truths = [factor * (50 * x[0] + 20 + 30 * x[2]) for x in points]
    return max(abs(model.predict(x) / y - 1) for x, y in zip(points, truths, strict=True))


def test_a_regression_learns_and_follows_changes() -> None:
    random, model = Random(4), Regression((100.0, 1.0, 100.0), (300.0, 10.0, 300.0))
    feed(model, random, 200)
    assert error(model) < 0.2
    assert model.alarms == 0
    feed(model, random, 60, factor=2.0)
    assert error(model, 2.0) < 0.2
    assert model.alarms == 1
    feed(model, random, 60, factor=0.5)
    assert error(model, 0.5) < 0.25


def test_a_regression_shrugs_at_single_outliers() -> None:
    random, model = Random(5), Regression((100.0, 1.0, 100.0), (300.0, 10.0, 300.0))
    feed(model, random, 200)
    before = model.predict((1.0, 1.0, 0.0))
    model.observe((1.0, 1.0, 0.0), 100 * before)
    assert model.predict((1.0, 1.0, 0.0)) < 1.25 * before
    assert model.alarms == 0


def test_without_news_nothing_grows() -> None:
    model = Regression((100.0, 1.0), (300.0, 10.0))
    for _ in range(5_000):
        model.observe((1.0, 1.0), 70.0)
    assert model.predict((1.0, 1.0)) == pytest.approx(70.0, rel=0.01)
    assert all(abs(v) <= 300.0**2 for row in model._covariance for v in row)
    assert min(model.coefficients) >= 0.0


def test_speeds_come_from_what_was_measured() -> None:
    run = world(Laws(noise=0.02), policy="static", local_share=0.5)
    run.run(400, per_s=6.0, later_share=0.6, new_tokens=500, answer=60)
    speeds = run.scene.placer.estimates.speeds
    assert speeds.append_ms_per_token == pytest.approx(0.05, rel=0.15)
    assert speeds.prefill_ms_per_token == pytest.approx(0.05, rel=0.25)
    assert speeds.transfer_ms_per_token == pytest.approx(0.01, abs=0.0101)
    assert run.scene.placer.estimates.answer_share > 0.9


def test_the_pace_of_a_slow_worker_reaches_its_pool() -> None:
    scene = pair(prefills=2, policy="static")
    known = scene.placer.estimates
    for number in range(40):
        name, took_ms = ("p0", 100.0) if number % 2 else ("p1", 300.0)
        note = known.remote(scene.worker(name), None, 10, scene.now_ms)
        known.prefill_done(note, (name, 1), 1_000, took_ms)
    assert scene.worker("p1").pace == 1.0
    placed = [scene.take(need(1_000)).prefill for _ in range(8)]
    assert scene.worker("p1").pace > 1.5 * scene.worker("p0").pace
    assert sum(worker is scene.worker("p1") for worker in placed) in (2, 3)


def test_paces_of_lives_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "PACES_MAX", 3)
    scene = pair(policy="static")
    known = scene.placer.estimates
    for epoch in range(9):
        note = known.remote(scene.worker("p0"), None, 10, scene.now_ms)
        known.prefill_done(note, ("p0", epoch), 1_000, 100.0)
    assert len(known._paces) == 3


def test_observations_without_a_note_teach_nothing() -> None:
    scene = pair(policy="learned")
    placer = scene.placer
    for asked in (None, need()):
        placer.prefill_done(
            need=asked,
            worker=("p0", 1),
            computed_tokens=10,
            cached_tokens=0,
            took_ms=5.0,
            now_ms=scene.now_ms,
        )
        placer.finished(
            need=asked,
            mode=Mode.LOCAL,
            orchestration=Orchestration.NONE,
            worker=("d0", 1),
            computed_tokens=10,
            prompt_tokens=10,
            ttft_ms=5.0,
            tpot_ms=5.0,
            running=1,
            now_ms=scene.now_ms,
        )
    assert placer.estimates.prefill.samples == placer.estimates.decode.samples == 0


def test_an_answer_of_another_worker_than_noted_teaches_nothing() -> None:
    scene = pair(decodes=2, policy="static", local_share=1.0)
    asked = need(2_000, session("d0"))
    scene.take(asked)
    known: Estimates = scene.placer.estimates
    assert asked.note is not None
    known.finished(
        asked.note,
        ("d1", 1),
        computed_tokens=10,
        ttft_ms=5.0,
        tpot_ms=5.0,
        running=1,
        now_ms=scene.now_ms,
    )
    assert known.append.samples == 0


def test_assumed_speeds_are_the_settings() -> None:
    speeds = Estimates(RouterSettings(assumed_prefill_tokens_per_s=1_000)).speeds
    assert speeds.prefill_ms_per_token == speeds.append_ms_per_token == 1.0
