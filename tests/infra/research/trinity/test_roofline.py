"""Utilisation against batch size: the formula, its fit, and what the model says of a GPU."""

import pytest

from infra.planning.hardware import SearchCosts
from infra.research.trinity.roofline import BATCHES, Saturation, curves, fit_saturation
from infra.simulator.machine.latency import Setup


def test_fit_recovers_parameters_of_points() -> None:
    true_curve = Saturation(roof=0.6, scale=64, exponent=0.8, slope=0.7)
    fitted_curve = fit_saturation([(batch, true_curve.at(batch)) for batch in BATCHES], scale=64)
    assert fitted_curve.roof == pytest.approx(0.6)
    assert fitted_curve.exponent == pytest.approx(0.8, abs=0.01)
    assert fitted_curve.slope == pytest.approx(0.7, abs=0.01)


def test_fit_without_scale_takes_batch_near_roof() -> None:
    assert fit_saturation([(1, 10.0), (2, 19.0), (4, 33.0), (8, 39.0), (16, 40.0)]).scale == 8
    assert fit_saturation([(1, 5.0)]) == Saturation(roof=5.0, scale=1)


def test_fit_of_flat_points_is_flat_from_first_batch() -> None:
    """Searches on one core are such points: one alone keeps it busy."""
    flat = fit_saturation([(1, 8.1), (2, 7.9), (4, 9.7), (8, 10.0)])
    assert flat == Saturation(roof=10.0, scale=1)
    assert flat.at(1) == flat.at(64) == 10.0


def test_prefill_reaches_compute_roof_above_other_stages() -> None:
    """The curves are those of the paper's figure 1."""
    curves_by_stage = {curve.stage: curve for curve in curves(Setup(), SearchCosts())}
    prefill, decode, search = (
        curves_by_stage[stage].fit for stage in ("prefill", "decode", "search")
    )
    assert prefill.roof == pytest.approx(Setup().gpu.flops_share, abs=0.01)
    assert decode.roof < 0.5 * prefill.roof
    assert search.roof < 0.1 * decode.roof
    assert prefill.scale < decode.scale < search.scale


def test_utilisation_never_falls_with_batch_size() -> None:
    for curve in curves(Setup(), SearchCosts()):
        values = [value for _, value in curve.points]
        assert values == sorted(values)
        assert all(0 < value < 1 for value in values)
