"""The decision benchmark on a small fleet: what it drives, not how fast that is."""

import json
from pathlib import Path

import pytest

from infra.bench.decisions import main as decisions
from infra.bench.decisions.large_fleet import Size
from infra.bench.decisions.main import FleetRun, figures_of

SMALL = Size(workers=20, sessions=200, blocks=2_000, requests=300, underway=60)


def test_the_load_reaches_every_part_of_the_core() -> None:
    runs = [FleetRun(SMALL, "learned", seed=1) for _ in range(2)]
    for run in runs:
        run.set_up()
        run.play()
    first, again = (figures_of(run) for run in runs)
    assert first["decisions"] == again["decisions"]
    counts = {kind: row["count"] for kind, row in first["ms"].items()}
    assert counts["place"] == 300
    assert sum(first["decisions"].values()) == counts["place"] + counts["handoff"]
    assert {name.split()[0] for name in first["decisions"]} == {"local", "remote", "replica"}
    assert first["sessions"] >= 200
    assert first["blocks"] >= 2_000
    assert counts["OutcomeArrived"] > 100


def test_the_report_is_written_and_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decisions, "QUICK", SMALL)
    monkeypatch.setattr(decisions, "BENCH_DIR", tmp_path)
    decisions.main(["--quick", "--json", "--policies", "static"])
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((tmp_path / "decisions.json").read_text())
    assert told["load"]["workers"] == 20
    assert [bar["name"] for bar in told["bars"]] == ["static: place p99", "static: handoff p99"]
