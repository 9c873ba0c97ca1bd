"""Each kind of fault alone, aimed at what it has to do with: it strikes, and nothing breaks."""

from dataclasses import replace

import pytest

from infra.simulator.cluster import READY_MS
from infra.simulator.faults.aiming import Planned
from infra.simulator.faults.kinds import KINDS
from infra.simulator.scenarios.run import run
from infra.simulator.scenarios.scenario import RECORD_BYTES_MAX, drawn


@pytest.mark.parametrize("kind", KINDS)
def test_it_strikes_and_everybody_is_served(kind: str) -> None:
    """(issue 14, 4)"""
    plan = [
        Planned(number=number, kind=kind, at_ms=READY_MS + 700.0 * number, phase="decoding")
        for number in range(4)
    ]
    scenario = replace(
        drawn(4), plan=plan, timeout_ms=6_000, record_bytes_max=RECORD_BYTES_MAX, searches=False
    )
    verdict = run(scenario)
    assert not verdict.violation
    assert verdict.reached[kind, "decoding"]
