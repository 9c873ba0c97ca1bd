"""Utilisation against batch size: the formula, its fit, and what the model says of a GPU."""

import pytest

from infra.evaluate.trinity.hardware import SearchCosts
from infra.evaluate.trinity.roofline import BATCHES, Saturation, curves, fit_saturation
from infra.simulator.machine.latency import Setup


def test_a_fit_finds_the_numbers_that_points_were_made_from() -> None:
    made = Saturation(roof=0.6, scale=64, exponent=0.8, slope=0.7)
    found = fit_saturation([(batch, made.at(batch)) for batch in BATCHES], scale=64)
    assert found.roof == pytest.approx(0.6)
    assert found.exponent == pytest.approx(0.8, abs=0.01)
    assert found.slope == pytest.approx(0.7, abs=0.01)


def test_without_a_scale_it_is_where_points_are_near_their_roof() -> None:
    assert fit_saturation([(1, 10.0), (2, 19.0), (4, 33.0), (8, 39.0), (16, 40.0)]).scale == 8
    assert fit_saturation([(1, 5.0)]) == Saturation(roof=5.0, scale=1)


def test_what_does_not_rise_is_flat_from_the_first_batch_on() -> None:
    """As searches on a core: one alone keeps it busy."""
    flat = fit_saturation([(1, 8.1), (2, 7.9), (4, 9.7), (8, 10.0)])
    assert flat == Saturation(roof=10.0, scale=1)
    assert flat.at(1) == flat.at(64) == 10.0


def test_prefill_reaches_the_compute_roof_and_the_others_stay_below() -> None:
    """The paper's figure 1."""
    found = {curve.stage: curve for curve in curves(Setup(), SearchCosts())}
    prefill, decode, search = (found[each].fit for each in ("prefill", "decode", "search"))
    assert prefill.roof == pytest.approx(Setup().gpu.flops_share, abs=0.01)
    assert decode.roof < 0.5 * prefill.roof
    assert search.roof < 0.1 * decode.roof
    assert prefill.scale < decode.scale < search.scale


def test_utilisation_never_falls_as_a_batch_grows() -> None:
    for curve in curves(Setup(), SearchCosts()):
        values = [value for _, value in curve.points]
        assert values == sorted(values)
        assert all(0 < value < 1 for value in values)
