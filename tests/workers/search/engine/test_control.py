"""The law of the control loop, as a pure function."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.search.engine import control
from workers.search.engine.control import ControlSettings, Signals


@pytest.mark.parametrize(
    ("signals", "direction"),
    [
        (Signals(link_bytes_per_s=20.0), 1),
        (Signals(link_bytes_per_s=200.0), 0),
        (Signals(prefill_wait_ms_p95=8.0), 1),
        (Signals(prefill_wait_ms_p95=1.0), 0),
        (Signals(decode_stalled_share=0.5), -1),
        (Signals(decode_stalled_share=0.01), 0),
        (Signals(), 0),
    ],
)
def test_the_loop_moves_towards_who_lacks(signals: Signals, direction: int) -> None:
    settings = ControlSettings(link_target_bytes_per_s=100.0, wait_target_ms=2.0)
    found = control.move(settings, signals, 0.5, 5.0)
    assert (found.share > 0.5) - (found.share < 0.5) == direction
    assert (found.flush_ms < 5.0) - (found.flush_ms > 5.0) == direction
    assert found.is_still == (direction == 0) and found.signals is signals


@given(
    st.floats(0, 1), st.floats(0.001, 1e4), st.floats(0, 1e9), st.floats(0, 1e6), st.floats(0, 1)
)
def test_the_loop_keeps_its_bounds(
    share: float, flush_ms: float, link: float, wait_ms: float, stalled: float
) -> None:
    settings = ControlSettings(link_target_bytes_per_s=1e6)
    signals = Signals(
        link_bytes_per_s=link, prefill_wait_ms_p95=wait_ms, decode_stalled_share=stalled
    )
    found = control.move(settings, signals, share, flush_ms)
    if not found.is_still:
        assert settings.share_min <= found.share <= settings.share_max
        assert settings.flush_min_ms <= found.flush_ms <= settings.flush_max_ms
    if settings.share_min <= share <= settings.share_max:
        assert abs(found.share - share) <= settings.share_step_max + 1e-12
