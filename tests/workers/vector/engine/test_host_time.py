"""The benchmark of what a search costs the host, at toy size: that all of it runs."""

import asyncio
from dataclasses import replace

from tests.workers.vector.engine import host_time
from tests.workers.vector.engine.host_time import BENCHMARK, bars


def test_host_time_measures_and_judges_every_part() -> None:
    toy = replace(BENCHMARK.quick, queries=200, lone=3, callers=(8, 90), repeats=1)
    figures = asyncio.run(host_time._measure(toy))
    assert set(figures) == {
        "lone", "8 callers", "90 callers", "rows that are linked", "bulk feeds",
    }  # fmt: skip
    assert all(bar.value and bar.value > 0 for bar in bars(figures))
    slow = {name: {"per_cpu_s": 1.0} for name in figures} | {"lone": {"us_p50": 101.0}}
    assert not any(bar.met for bar in bars(slow))
