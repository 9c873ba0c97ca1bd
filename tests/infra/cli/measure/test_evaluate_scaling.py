"""`trivium evaluate scaling` as people and scripts call it."""

import json
from pathlib import Path

import pytest

from infra.bench import results
from tests.infra.cli.trivium_runner import trivium_here


def test_evaluate_scaling_reports_worker_hours_and_draws_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "BENCH_DIR", tmp_path)
    day = ("--minutes", "1", "--noon", "8", "--workers-max", "3", "--ttft", "5000")
    command = ("evaluate", "scaling", *day, "--jobs", "1", "--out", str(tmp_path))
    code, output, errors = trivium_here(*command)
    assert code == 0, errors
    assert "worker-hours" in output and "follows" in output and "1P1D" in output
    report = json.loads((tmp_path / "scaling.json").read_text())
    (bar,) = report["bars"]
    assert bar["target"] == "> 0"
    following = report["figures"]["following"]
    assert bar["met"] <= (following["in_time"] >= 0.99), "only where they serve as they should"
    assert ("less than 99% in time" in output) == (following["in_time"] < 0.99)
    assert report["figures"]["following"]["requests"] > 100
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("form", ["json", pytest.param("text", marks=pytest.mark.slow)])
def test_evaluate_interruptions_compares_replicas_and_pairs(form: str) -> None:
    command = ("evaluate", "interruptions", "--answer", "100")
    code, output, errors = trivium_here(*command, *(["--json"] if form == "json" else []))
    assert code == 0, errors
    if form == "text":
        assert "1P1D" in output
        return
    replica, pair = json.loads(output)
    assert (replica["pools"], pair["pools"]) == ("1R", "1P1D")
    assert replica["per_answer"] > pair["per_answer"]
