"""Each kind of fault alone, aimed at what it has to do with: it strikes, and nothing breaks."""

from dataclasses import replace

import pytest

from infra.simulator.cluster import READY_MS
from infra.simulator.faults import kinds
from infra.simulator.faults.aiming import PlannedFault
from infra.simulator.faults.kinds import KINDS
from infra.simulator.scenarios.run import run
from infra.simulator.scenarios.scenario import RECORD_BYTES_MAX, draw_scenario


@pytest.mark.parametrize("kind", KINDS)
def test_fault_kind_strikes_without_violation(kind: str) -> None:
    plan = [
        PlannedFault(number=number, kind=kind, at_ms=READY_MS + 700.0 * number, phase="decoding")
        for number in range(4)
    ]
    scenario = replace(
        draw_scenario(4),
        plan=plan,
        timeout_ms=6_000,
        record_bytes_max=RECORD_BYTES_MAX,
        searches=False,
    )
    verdict = run(scenario)
    assert not verdict.violation
    assert verdict.reached[kind, "decoding"]


@pytest.mark.parametrize("seed", range(4))
def test_slow_workers_starve_no_request_over_large_prompts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker loses its lease over a large prompt, which then comes first again."""
    monkeypatch.setattr(kinds, "SLOW_TIMES", 0.0)  # none is only slow
    plan = [
        PlannedFault(
            number=number, kind="slow worker", at_ms=READY_MS + 100.0 * number, phase="decoding"
        )
        for number in range(6)
    ]
    verdict = run(replace(draw_scenario(seed), plan=plan, timeout_ms=20_000))
    assert not verdict.violation
    assert verdict.reached["slow worker", "decoding"]
