"""Measuring figure 1's points: its file, and its sums over a made-up engine."""

import json
from pathlib import Path

import pytest

from infra.research.trinity import measure, stage_measurements
from infra.research.trinity.stage_measurements import StageMeasurement

STAGE = StageMeasurement(
    stage="search", what="callers", unit="searches/s", points=[(1.0, 10.0), (2.0, 19.0)], about="x"
)


def test_measurements_survive_write_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stages(model: str, seed: int, report: measure.Reporter) -> list[StageMeasurement]:
        report(f"{model} {seed}")
        return [STAGE]

    monkeypatch.setattr(measure, "_stages", stages)
    messages: list[str] = []
    file = tmp_path / "measured.json"
    assert measure.measure("tiny", 3, messages.append, file) == [STAGE]
    assert messages == ["tiny 3"]
    assert stage_measurements.read(file) == [STAGE]
    assert {"machine", "command", "seed", "commit"} <= json.loads(file.read_text()).keys()


def test_read_returns_nothing_without_file(tmp_path: Path) -> None:
    assert stage_measurements.read(tmp_path / "away.json") == []


async def test_points_keep_best_of_repeats() -> None:
    rates = iter([5.0, 8.0, 12.0, 11.0])

    async def ask(batch: int) -> float:
        return next(rates)

    points = await measure._points("decode", ask, (1, 2), lambda message: None)
    assert points == [(1.0, 8.0), (2.0, 12.0)]


async def test_search_measurement_counts_searches_per_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("ROWS", 500), ("DIM", 16), ("BATCHES", (1, 2)), ("_SEARCHES", 16)):
        monkeypatch.setattr(measure, name, value)
    measurement = await measure._search(1, lambda message: None)
    assert [batch for batch, _ in measurement.points] == [1.0, 2.0, 64.0]
    assert all(rate > 0 for _, rate in measurement.points)


def test_committed_measurements_cover_three_stages() -> None:
    stages = {measurement.stage: measurement for measurement in stage_measurements.read()}
    assert stages.keys() == {"prefill", "decode", "search"}
    for measurement in stages.values():
        assert "seed 1" in measurement.about
        assert len(measurement.points) >= 6
