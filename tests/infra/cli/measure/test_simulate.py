"""`trivium simulate` as people and scripts call it."""

import json

import pytest

from infra.simulator.faults.kinds import KINDS
from tests.infra.cli.running import trivium_here
from tests.infra.simulator.scenarios.bugs import BUGS


def test_it_prints_what_was_reached_or_all_figures() -> None:
    code, output, errors = trivium_here("simulate", "--seeds", "3", "--jobs", "1")
    assert code == 0, errors
    assert "3 seeds" in output and "violations: 0" in output
    assert all(kind in output for kind in KINDS)
    code, output, _ = trivium_here("simulate", "--seeds", "3", "--jobs", "1", "--json")
    figures = json.loads(output)
    assert code == 0 and figures["seeds"] == 3 and figures["violations"] == []


def test_a_violation_prints_the_command_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS["a void order is answered"].put_in(monkeypatch)
    code, output, errors = trivium_here("simulate", "--until-fails", "--jobs", "1")
    assert code == 1 and "violations: 1" in output
    again = errors.partition("again: trivium ")[2].split("\n")[0].split()
    assert again[:2] == ["simulate", "--seed"]
    code, output, _ = trivium_here(*again, "--json")
    told = json.loads(output)
    assert code == 1 and told["violation"]
    part = told["command"].removeprefix("trivium ").split()
    code, output, _ = trivium_here(*part, "--json")
    assert code == 1 and json.loads(output) == told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--minimize",), "--faults, --clients and --minimize: expected with --seed"),
        (("--seed", "3", "--faults", "99"), "--faults: expected of 0, 1"),
        (("--seed", "3", "--clients", "who"), "--clients: expected of c-0"),
    ],
)
def test_what_cannot_be_run_is_said_in_words(arguments: tuple[str, ...], message: str) -> None:
    code, _, errors = trivium_here("simulate", *arguments)
    assert code == 2 and message in errors
