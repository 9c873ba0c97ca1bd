"""Where searches run: what is said where the device that is asked for is missing."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.errors import ConfigError
from workers.vector.cuda import launch
from workers.vector.engine import backend
from workers.vector.engine.engine import EngineSettings, SearchEngine


def test_backend_rejects_missing_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "reason_against", lambda: "CuPy is missing")
    with pytest.raises(ConfigError, match="device cuda: CuPy is missing; or choose device cpu"):
        SearchEngine(EngineSettings(device="cuda"))
    assert backend.cuda_device("auto") is None
    with pytest.raises(ConfigError, match="expected one of cpu, cuda, auto, found 'tpu'"):
        backend.cuda_device("tpu")
    with pytest.raises(ConfigError, match="builder cuvs: expected device cuda"):
        backend.graph_builder("cpu", "cuvs")


def test_backend_chooses_device_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy: Any = SimpleNamespace(
        cuda=SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=lambda: 2))
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for device in ("cuda", "auto"):
        with pytest.raises(ConfigError, match="cuda_device: expected a number below 2.*found 2"):
            SearchEngine(EngineSettings(device=device, cuda_device=2))
    monkeypatch.setattr(launch, "CudaDevice", lambda number: number)
    opened: Any = backend.cuda_device("cuda", 1)
    assert opened == 1
