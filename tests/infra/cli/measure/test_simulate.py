"""`trivium simulate` as people and scripts call it."""

import json

import pytest

from infra.simulator.faults.kinds import KINDS
from tests.infra.cli.trivium_runner import trivium_here
from tests.infra.simulator.scenarios.bugs import BUGS


def test_simulate_prints_summary_or_json() -> None:
    code, output, errors = trivium_here("simulate", "--seeds", "3", "--jobs", "1")
    assert code == 0, errors
    assert "3 seeds" in output and "violations: 0" in output
    assert all(kind in output for kind in KINDS)
    code, output, _ = trivium_here("simulate", "--seeds", "3", "--jobs", "1", "--json")
    figures = json.loads(output)
    assert code == 0 and figures["seeds"] == 3 and figures["violations"] == []


def test_simulate_prints_command_that_reproduces_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS["a void order is answered"].put_in(monkeypatch)
    code, output, errors = trivium_here("simulate", "--until-fails", "--jobs", "1")
    assert code == 1 and "violations: 1" in output
    repeat_command = errors.partition("again: trivium ")[2].split("\n")[0].split()
    assert repeat_command[:2] == ["simulate", "--seed"]
    code, output, _ = trivium_here(*repeat_command, "--json")
    report = json.loads(output)
    assert code == 1 and report["violation"]
    part = report["command"].removeprefix("trivium ").split()
    code, output, _ = trivium_here(*part, "--json")
    assert code == 1 and json.loads(output) == report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--minimize",), "--faults, --clients and --minimize: expected with --seed"),
        (("--seed", "3", "--faults", "99"), "--faults: expected of 0, 1"),
        (("--seed", "3", "--clients", "who"), "--clients: expected of c-0"),
    ],
)
def test_simulate_rejects_bad_arguments(arguments: tuple[str, ...], message: str) -> None:
    code, _, errors = trivium_here("simulate", *arguments)
    assert code == 2 and message in errors
