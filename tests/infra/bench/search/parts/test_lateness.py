"""What held a loop up, apart from what the machine did."""

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE
from typing import Any

import pytest

from infra.bench.search.parts import steal_time
from infra.bench.search.parts.lateness import TICK_S, _Look, watch_lateness
from infra.bench.search.parts.steal_time import StealTime, watch_steal
from tests.waits import until
from tests.workers.processes import stands_still


def test_steal_time_sums_gaps_of_worst_core_within_span() -> None:
    steal = StealTime()
    assert steal.within(0.0, 9.0) == 0.0
    steal.gaps = [[(1.0, 2.0), (3.0, 5.0)], [(1.5, 1.75)]]
    assert steal.within(0.0, 9.0) == 3.0
    assert steal.within(1.5, 3.5) == 1.0
    assert steal.within(2.0, 3.0) == 0.0


@pytest.mark.parametrize(
    ("waited", "stolen_s", "used", "held_s"),
    [(0.0, 0.0, 9.0, 8.0), (5.0, 0.0, 9.0, 3.0), (0.0, 7.0, 9.0, 1.0), (5.0, 6.0, 9.0, 2.0),
     (0.0, 0.0, 4.0, 4.0), (9.0, 0.0, 9.0, 0.0)],
)  # fmt: skip
def test_lateness_excludes_machine_waits_from_held_time(
    waited: float, stolen_s: float, used: float, held_s: float
) -> None:
    late_s, found_s = _Look(1.0, 9.0 + TICK_S, waited, used).late_and_held(stolen_s)
    assert (late_s, found_s) == pytest.approx((8.0, held_s))


async def test_steal_watch_covers_all_cores() -> None:
    async with watch_steal() as steal:
        assert len(steal.gaps) == len(os.sched_getaffinity(0))


async def test_steal_time_reports_stopped_core() -> None:
    """The observer is stopped in place of its core, so no queue wait is counted."""
    script: Any = steal_time.__file__
    core = str(min(os.sched_getaffinity(0)))
    looker = await asyncio.create_subprocess_exec(sys.executable, script, core, stdout=PIPE)
    assert looker.stdout is not None
    try:
        assert await looker.stdout.readline() == b"ready\n"
        looker.send_signal(signal.SIGSTOP)
        await until(lambda: stands_still(looker.pid))
        stopped_s = time.perf_counter()
        await until(lambda: time.perf_counter() > stopped_s + 0.3)
        went_on_s = time.perf_counter()
        looker.send_signal(signal.SIGCONT)
        begin = end = 0.0
        while end < (stopped_s + went_on_s) / 2:  # gaps before that are the machine's own
            begin, end = map(float, (await looker.stdout.readline()).split())
        assert end - begin >= went_on_s - stopped_s - 0.01
    finally:
        looker.kill()
        await looker.wait()


async def test_lateness_counts_computing_loop_as_late() -> None:
    async with watch_lateness() as lateness:
        await asyncio.sleep(0)
        ended_s = time.process_time() + 0.2
        while time.process_time() < ended_s:
            pass
    figures = lateness.figures()
    assert figures["late_ms"] >= 190
    assert figures["held_ms"] <= figures["late_ms"]
