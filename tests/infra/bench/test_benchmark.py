"""A benchmark as a command: its options, its report, and what it prints."""

import asyncio
import json
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console

from infra.bench import results
from infra.bench.benchmark import Benchmark, BenchmarkResult, option
from infra.bench.results import at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    streams: tuple[int, ...] = option((1, 2), "closed loops")
    warm_up_s: float = option(9.0, "before")
    ways: tuple[str, ...] = option(("a",), flag="only", choices=("a", "b"))
    settle_s: float = 0.5
    seed: int = option(7)


async def run(options: Options, console: Console) -> BenchmarkResult:
    console.print("it runs")
    bars = [at_least("rate", 3.0, 2, "x")]
    return BenchmarkResult(
        figures={"rate": 3}, bars=bars, tables=["a table"], load={"words": 4}, beside=" and more"
    )


EXAMPLE = Benchmark(
    name="an-example", about="Says how.", run=run, full=Options(),
    quick=Options(warm_up_s=1.0), quick_help="less",
)  # fmt: skip


def test_benchmark_parses_options_by_field_type() -> None:
    assert EXAMPLE.options([]) == (Options(), False)
    arguments = "--quick --json --streams 4 8 --only b a --seed 3".split()
    expected = Options(streams=(4, 8), warm_up_s=1.0, ways=("b", "a"), seed=3)
    assert EXAMPLE.options(arguments) == (expected, True)
    assert EXAMPLE.options(["--quick", "--warm-up", "2"])[0].warm_up_s == 2.0


@pytest.mark.parametrize(
    "arguments", [["--settle", "1"], ["--streams", "x"], ["--only", "c"], ["--streams"]]
)
def test_benchmark_refuses_unknown_options(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        EXAMPLE.options(arguments)


def test_help_describes_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        EXAMPLE.options(["--help"])
    output = capsys.readouterr().out
    for word in ("Says how.", "closed loops", "--warm-up", "{a,b}", "less"):
        assert word in output, word


@pytest.mark.parametrize("as_json", [False, True])
def test_benchmark_writes_and_prints_report(
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(results, "BENCH_DIR", tmp_path)
    EXAMPLE.main(["--json"] * as_json)
    output = capsys.readouterr()
    text = output.err if as_json else output.out
    for words in ("it runs", "a table", "All 1 bars met.", "an_example.json and more."):
        assert words in text.replace("\n", ""), words
    report = json.loads((tmp_path / "an_example.json").read_text())
    assert report["seed"] == 7 and report["figures"] == {"rate": 3}
    assert report["load"]["words"] == 4 and report["load"]["streams"] == [1, 2]
    assert [bar["name"] for bar in report["bars"]] == ["rate"]
    if as_json:
        assert json.loads(output.out) == report
    else:
        assert output.err == ""


async def run_with_sigterm(options: Options, console: Console) -> BenchmarkResult:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        raise AssertionError
    finally:
        await asyncio.sleep(0)
        console.print("all is stopped")


def test_benchmark_stops_its_processes_on_sigterm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Frozen processes do not end alone, and background jobs of scripts ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit, match="143"):
            replace(EXAMPLE, run=run_with_sigterm).main([])
    finally:
        signal.signal(signal.SIGINT, before)
    assert "all is stopped" in capsys.readouterr().out
