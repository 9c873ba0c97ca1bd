"""(a) and (c) live: pinning, and what is made of measurements; the whole of it once, short."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from infra.bench.retrieval.latency import IDLE, SATURATED
from infra.evaluate.live import coupled
from tests.infra.cli.running import trivium
from tests.long_leases import LONG_LEASES

SPREAD = {"p50": 10.0, "p99": 20.0, "count": 5}
ROWS = {
    when: {
        "ttft_ms": {"with": SPREAD, "without": SPREAD},
        "search_ms": {"prefill": SPREAD, "decode": SPREAD},
    }
    for when in (IDLE, SATURATED)
}


def test_every_thread_of_a_process_is_pinned() -> None:
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


def test_figures_add_up_over_the_copies() -> None:
    found = coupled.figures(ROWS, [os.getpid()], {"retrieval-0": 1.5, "retrieval-1": 2.0})
    assert found["copies"] == 2
    assert found["taking_in_cpu_s"] == 3.5
    assert found["memory_mib"] == pytest.approx(coupled.memory_mib(os.getpid()), rel=0.2)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(coupled.table({"a": found, "c": found}))
    text = console.export_text()
    assert "copies of the index" in text
    assert "10 / 20" in text


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.timeout(1_800)
def test_both_ways_run_and_answer(tmp_path: Path) -> None:
    """Few chats on whole stacks: two copies in (a), one in (c)."""
    code, output, errors = trivium(
        *("evaluate", "trinity", "--live", "--rate", "5", "--load-s", "2", "--json"),
        home=tmp_path,
        env=LONG_LEASES,
    )
    assert code == 0, errors
    found = json.loads(output)
    assert (found["a"]["copies"], found["c"]["copies"]) == (2, 1)
    for way in found.values():
        assert way["ttft_ms"][IDLE]["p50"] > 0
        assert way["memory_mib"] > 10
