"""(a) and (c) live: pinning, and what is made of measurements; the whole of it once, short."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from infra.bench.retrieval.loads import IDLE, SATURATED
from infra.research.live import coupled
from tests.infra.cli.trivium_runner import trivium
from tests.long_leases import LONG_LEASES

SPREAD = {"p50": 10.0, "p99": 20.0, "count": 5}
ROWS = {
    when: {
        "ttft_ms": {"with": SPREAD, "without": SPREAD},
        "search_ms": {"prefill": SPREAD, "decode": SPREAD},
    }
    for when in (IDLE, SATURATED)
}


def test_pin_process_pins_all_threads() -> None:
    code = "import threading; e = threading.Event(); threading.Thread(target=e.wait).start()"
    program = [sys.executable, "-c", f"{code}; print(1, flush=True); e.wait()"]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        core = min(os.sched_getaffinity(0))
        coupled.pin_process(child.pid, [core])
        tasks = [int(task.name) for task in Path(f"/proc/{child.pid}/task").iterdir()]
        pinned = [os.sched_getaffinity(task) for task in tasks]
        child.kill()
    assert pinned == [{core}, {core}]


def test_figures_sum_over_copies() -> None:
    result = coupled.figures(ROWS, [os.getpid()], {"retrieval-0": 1.5, "retrieval-1": 2.0})
    assert result["copies"] == 2
    assert result["taking_in_cpu_s"] == 3.5
    assert result["memory_mib"] == pytest.approx(coupled.memory_mib(os.getpid()), rel=0.2)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(coupled.table({"a": result, "c": result}))
    text = console.export_text()
    assert "copies of the index" in text
    assert "10 / 20" in text


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.timeout(1_800)
def test_trinity_live_runs_both_placements(tmp_path: Path) -> None:
    """Few chats on whole stacks: two copies in (a), one in (c)."""
    code, output, errors = trivium(
        *("evaluate", "trinity", "--live", "--rate", "5", "--load-s", "2", "--json"),
        home=tmp_path,
        env=LONG_LEASES,
    )
    assert code == 0, errors
    results = json.loads(output)
    assert (results["a"]["copies"], results["c"]["copies"]) == (2, 1)
    for way in results.values():
        assert way["ttft_ms"][IDLE]["p50"] > 0
        assert way["memory_mib"] > 10
