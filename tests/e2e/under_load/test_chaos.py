"""What `make chaos ARGS=--quick` does: whatever dies, clients get what was accepted,
once, whole and right. How long they wait is not judged here, where other tests take the cores;
nor how long processes take to be back. Leases are those of a deployment, but for this process,
which looks whether they are.
"""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from infra.bench import stacks
from infra.bench.faults import chaos
from infra.bench.tenants.hostile import MISDEEDS
from schemas.errors import ConfigError
from tests.e2e.harness import PatientStack
from tests.long_leases import long_leases
from tests.waits import START_S

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(1_800)]


@pytest.mark.parametrize("hostile", [0, 1])
async def test_chaos_run_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hostile: int
) -> None:
    options = replace(chaos.BENCHMARK.quick, hostile=hostile)
    monkeypatch.setattr(chaos, "BENCH_DIR", tmp_path)
    monkeypatch.setattr(stacks, "Stack", PatientStack)
    for patience in ("BACK_S", "FOUND_S", "DRAIN_S"):
        monkeypatch.setattr(chaos, patience, START_S)
    try:
        with long_leases():
            result = await chaos.run(options, Console(stderr=True, width=100))
    except ConfigError as error:  # no Java or no jars: the message says which
        pytest.skip(str(error))
    figures = result.figures
    assert [bar for bar in result.bars if not bar.met and not bar.unit] == []
    blows = Counter(figures["blows"]) + Counter(figures.get("alone", {}).get("blows"))
    assert blows.total() > 10
    misdeeds = {name.partition(":")[0] for name in figures["misdeeds"]}
    assert misdeeds == ({misdeed.__name__ for misdeed in MISDEEDS} if hostile else set())
    assert figures["outcomes"]["kinds"]["completed"] > 300
    assert figures["clients"]["ended"]["hung up"] > 5
    history = (tmp_path / "chaos" / "history.jsonl").read_text().splitlines()
    counts = Counter(json.loads(line)["what"] for line in history)
    assert counts["answer"] == figures["clients"]["answers"]
    assert counts["blow"] == blows.total()
