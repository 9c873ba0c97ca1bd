"""Measuring figure 1's points: its file, and its sums over a made-up engine."""

import json
from pathlib import Path

import pytest

from infra.evaluate.trinity import measure, stage_measurements
from infra.evaluate.trinity.stage_measurements import StageMeasurement

STAGE = StageMeasurement(
    stage="search", what="callers", unit="searches/s", points=[(1.0, 10.0), (2.0, 19.0)], about="x"
)


def test_what_is_measured_is_written_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stages(model: str, seed: int, told: measure.Reporter) -> list[StageMeasurement]:
        told(f"{model} {seed}")
        return [STAGE]

    monkeypatch.setattr(measure, "_stages", stages)
    said: list[str] = []
    file = tmp_path / "measured.json"
    assert measure.measure("tiny", 3, said.append, file) == [STAGE]
    assert said == ["tiny 3"]
    assert stage_measurements.read(file) == [STAGE]
    assert {"machine", "command", "seed", "commit"} <= json.loads(file.read_text()).keys()


def test_nothing_is_read_where_nothing_was_measured(tmp_path: Path) -> None:
    assert stage_measurements.read(tmp_path / "away.json") == []


async def test_a_point_is_the_best_of_its_repeats() -> None:
    rates = iter([5.0, 8.0, 12.0, 11.0])

    async def ask(batch: int) -> float:
        return next(rates)

    found = await measure._points("decode", ask, (1, 2), lambda said: None)
    assert found == [(1.0, 8.0), (2.0, 12.0)]


async def test_searches_of_a_small_index_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROWS", 500), ("DIM", 16), ("BATCHES", (1, 2)), ("_SEARCHES", 16)):
        monkeypatch.setattr(measure, name, value)
    found = await measure._search(1, lambda said: None)
    assert [batch for batch, _ in found.points] == [1.0, 2.0, 64.0]
    assert all(rate > 0 for _, rate in found.points)


def test_the_points_that_are_committed_are_of_all_three_stages() -> None:
    stages = {each.stage: each for each in stage_measurements.read()}
    assert stages.keys() == {"prefill", "decode", "search"}
    for each in stages.values():
        assert "seed 1" in each.about
        assert len(each.points) >= 6
