"""Settings of the simulated engine that stop the start."""

from dataclasses import replace

import pytest

from schemas.errors import ConfigError
from workers.llm.sim.settings import SimSettings


def test_settings_reject_invalid_values() -> None:
    with pytest.raises(ConfigError, match=r"sim\.running_max: expected at least 1, found 0"):
        SimSettings(running_max=0)
    with pytest.raises(ConfigError, match=r"sim\.transfer: expected one of nixl, memory, none"):
        SimSettings(transfer="carrier pigeon")
    with pytest.raises(ConfigError, match=r"sim\.handle_margin_ms: expected under handle_ttl_ms"):
        SimSettings(handle_ttl_ms=500)
    with pytest.raises(ConfigError, match=r"sim\.tensor_parallel: expected a divisor of 4"):
        SimSettings(tensor_parallel=8)
    with pytest.raises(ConfigError, match=r"sim\.decode_step_ms: expected above 0"):
        replace(SimSettings(), decode_step_ms=0)
