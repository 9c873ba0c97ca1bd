"""The decision benchmark on a small fleet: what it drives, not how fast that is."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from infra.bench import results
from infra.bench.decisions.main import BENCHMARK, DecisionOptions, FleetRun, figures_of

SMALL = DecisionOptions(
    workers=20, sessions=200, blocks=2_000, requests=300, concurrent_requests=60
)


def test_fleet_run_reaches_all_parts_of_core() -> None:
    runs = [FleetRun(SMALL, "learned", seed=1) for _ in range(2)]
    for run in runs:
        run.set_up()
        run.play()
    first, second = (figures_of(run) for run in runs)
    assert first["decisions"] == second["decisions"]
    counts = {kind: row["count"] for kind, row in first["ms"].items()}
    assert counts["place"] == 300
    assert sum(first["decisions"].values()) == counts["place"] + counts["handoff"]
    assert {name.split()[0] for name in first["decisions"]} == {"local", "remote", "replica"}
    assert first["sessions"] >= 200
    assert first["blocks"] >= 2_000
    assert counts["OutcomeArrived"] > 100


def test_benchmark_writes_and_prints_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "BENCH_DIR", tmp_path)
    small = replace(BENCHMARK, quick=SMALL)
    small.main(["--quick", "--json", "--policies", "static"])
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "decisions.json").read_text())
    assert report["load"]["workers"] == 20
    assert [bar["name"] for bar in report["bars"]] == ["static: place p99", "static: handoff p99"]
