"""Deliberate bugs, of which each is found by one of the first 500 seeds.

Where the first of these is late the test does not begin at 0, which takes a minute; `make bugs`
does.
"""

import os

import pytest

from infra.simulator.scenarios.seed_runner import run_seed
from tests.infra.simulator.scenarios.bugs import BUGS

SEEDS_MAX = 500
FROM_0 = "BUGS_FROM_0" in os.environ


@pytest.mark.parametrize("bug", BUGS)
def test_some_seed_finds_it(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug].put_in(monkeypatch)
    first = 0 if FROM_0 else BUGS[bug].first
    verdicts = map(run_seed, range(first, SEEDS_MAX))
    found = next((each for each in verdicts if each.violation), None)
    assert found is not None, f"{SEEDS_MAX} seeds have not found it"
    said = BUGS[bug].finds.split(" or ")
    assert any(each in found.violation for each in said), f"seed {found.seed}: {found.violation}"
