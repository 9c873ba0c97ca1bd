"""The GPU search benchmark at toy size, emulated: that every part runs and is reported."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from infra.bench import results
from infra.bench.search.gpu import kernels_alone, single_searches
from infra.bench.search.gpu import main as search_gpu
from infra.bench.search.systems import OURS
from infra.bench.search.vectors import truth
from schemas.errors import ConfigError
from tests.workers.vector.cuda.emulator import COMPILER, EmulatedDevice
from workers.vector.cuda import builder
from workers.vector.cuda.batch import BatchSettings
from workers.vector.cuda.device import Launch
from workers.vector.cuda.launch import reason_against
from workers.vector.engine import backend
from workers.vector.graph.build import own_graph
from workers.vector.kernels.metrics import SQUARED_L2
from workers.vector.limits import DEGREE

Array = np.ndarray[Any, Any]

SIZES = BatchSettings(
    slots=16, sizes=(2, 8), steps=(1, 4), top_m_max=512, k_max=512, dim_max=64, tasks_max=256,
    seed_rows=64, merge_max=64, threads=32,
)  # fmt: skip
TOY = replace(
    search_gpu.BENCHMARK.quick, rows=1_300, dim=16, queries=24, checked=12, efforts=(16, 96),
    width=2, repeats=1, singles=2, callers=3, asks=1, batch=SIZES,
)  # fmt: skip


class Emulated(EmulatedDevice):
    """With a clock that says a millisecond for each launch, and each copy."""

    name = "emulated"

    def times_ms(self, launches: Sequence[Launch]) -> list[float]:
        self.finish()
        self.run(launches)
        return [1.0] * len(launches)

    def copy_ms(self, _size_bytes: int, times: int) -> float:
        return float(times)


class Brute:
    """Stands for cuVS: finds the true neighbours."""

    def __init__(self, vectors: Array) -> None:
        self.vectors = vectors

    @classmethod
    def build(cls, vectors: Array, _degree: int) -> "Brute":
        return cls(vectors)

    @classmethod
    def of_graph(cls, vectors: Array, _graph: Array) -> "Brute":
        return cls(vectors)

    def graph(self) -> Array:
        return own_graph(self.vectors, DEGREE, SQUARED_L2, 0, seed=0, threads=1)

    def uploaded(self, queries: Array) -> Array:
        return queries

    def search(self, queries: Array, k: int, _itopk: int, *, samplings: int) -> Any:
        assert samplings in TOY.samplings
        return SimpleNamespace(copy_to_host=lambda: truth(self.vectors, queries, k))


def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(results, "BENCH_DIR", tmp_path)
    monkeypatch.setattr(kernels_alone, "_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(single_searches, "_WARM_UP", 1)


def read_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "search_gpu.json").read_text())
    figures = report["figures"]
    assert figures["ids"] == {"queries": 12, "equal": 12}
    assert figures["speed"]["curves"][OURS][-1]["recall"] > 0.9
    assert set(figures["speed"]["at_recall"]) == {"0.93", "0.98"}
    assert figures["singles"]["callers"]["per_s"] > 0
    kernels = figures["kernels"]
    assert set(kernels["by_kernel"]) == {"turn_begin", "walk", "turn_end"}
    assert sum(row["share"] for row in kernels["by_kernel"].values()) == pytest.approx(1)
    assert kernels["read_of_copy"] == kernels["read_gb_per_s"] / kernels["copy_gb_per_s"]
    return report


@pytest.mark.skipif(COMPILER is None, reason="the emulator of CUDA kernels needs a C++ compiler")
def test_benchmark_runs_and_reports_all_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy(monkeypatch, tmp_path)
    monkeypatch.setattr(builder, "graph_on", lambda _device: own_graph)  # all pairs take long
    monkeypatch.setattr(search_gpu, "reason_against", lambda: None)
    monkeypatch.setattr(backend, "cuda_device", lambda *_: Emulated())
    monkeypatch.setattr(search_gpu, "Cagra", Brute)
    replace(search_gpu.BENCHMARK, quick=TOY).main(["--quick", "--json"])
    report = read_report(tmp_path, capsys)
    curves = report["figures"]["speed"]["curves"]
    assert list(curves) == [
        OURS, search_gpu.OURS_ON_CUVS, "cuvs, 1 samplings", "cuvs, graph of trivium, 1 samplings",
        "cuvs, 8 samplings", "cuvs, graph of trivium, 8 samplings",
    ]  # fmt: skip
    assert curves[search_gpu.OURS_ON_CUVS][-1]["recall"] > 0.9
    assert list(report["figures"]["speed"]["graph_s"]) == [OURS, "cuvs"]
    assert curves["cuvs, 8 samplings"][0]["recall"] == 1
    kernels = report["figures"]["kernels"]
    walks = kernels["by_kernel"]["walk"]["launches"]
    assert walks == kernels["by_kernel"]["turn_end"]["launches"]
    assert kernels["read_gb_per_s"] == pytest.approx(kernels["distances"] * 64 / walks / 1e6)
    assert kernels["copy_gb_per_s"] == pytest.approx(2 * (1 << 20) / 1e6)
    assert [bar["met"] for bar in report["bars"]][0]


@pytest.mark.gpu
def test_benchmark_runs_on_cuda_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if (why := reason_against()) is not None:
        pytest.skip(why)
    toy(monkeypatch, tmp_path)
    replace(search_gpu.BENCHMARK, quick=TOY).main(["--quick", "--json"])
    read_report(tmp_path, capsys)


def test_benchmark_without_device_reports_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_gpu, "reason_against", lambda: "CuPy is missing")
    with pytest.raises(ConfigError, match="expected a CUDA device, found none: CuPy is missing"):
        search_gpu.BENCHMARK.main([])
