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
def test_seed_runner_finds_deliberate_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug].put_in(monkeypatch)
    first = 0 if FROM_0 else BUGS[bug].first
    verdicts = map(run_seed, range(first, SEEDS_MAX))
    failure = next((verdict for verdict in verdicts if verdict.violation), None)
    assert failure is not None, f"{SEEDS_MAX} seeds have not found it"
    messages = BUGS[bug].finds.split(" or ")
    assert any(message in failure.violation for message in messages), (
        f"seed {failure.seed}: {failure.violation}"
    )
