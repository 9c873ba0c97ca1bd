"""`trivium evaluate trinity` as people and scripts call it."""

import json
from pathlib import Path

import pytest

from infra.research.trinity import study
from tests.infra.cli.trivium_runner import trivium_here


@pytest.mark.parametrize("form", ["text", pytest.param("json", marks=pytest.mark.slow)])
def test_evaluate_trinity_prints_placements_or_json(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.bench.results.BENCH_DIR", tmp_path)
    monkeypatch.setattr(study, "variations", lambda *, quick: [])
    monkeypatch.setattr(study, "LOADS", (0.1, 0.2))
    command = (
        "evaluate",
        "trinity",
        "--quick",
        "--gpus",
        "4",
        "--jobs",
        "1",
        "--out",
        str(tmp_path),
    )
    code, output, errors = trivium_here(*command, *(["--json"] if form == "json" else []))
    assert code == 0, errors
    assert "load" in errors, "progress is shown"
    if form == "json":
        assert json.loads(output)["sweeps"][0]["name"] == "load"
    else:
        assert "a, in place" in output and "report: " in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "tpu"), "--gpu: expected one of h100, h200, a100, l4, found 'tpu'"),
        (("--rows", "1e10"), "placement c: 16 GPUs hold no prefill and decode worker of 1 GPU"),
    ],
)
def test_evaluate_trinity_rejects_bad_arguments(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    code, _, errors = trivium_here("evaluate", "trinity", "--out", str(tmp_path), *arguments)
    assert code == 2
    assert message in errors
