"""The search benchmark at toy size: that every part runs and is reported, not how fast that is."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from infra.bench import results
from infra.bench.search import main as search
from infra.bench.search import systems
from infra.bench.search.parts import mixed_traffic, scheduling, through_the_log
from infra.bench.search.scene import PARTS, QUICK, SearchScene
from infra.bench.search.systems import OperatingPoint, at_rate, at_recall
from schemas.settings import LogSettings
from tests.long_leases import LONG_LEASES, long_leases
from workers.retrieval.settings import RetrievalSettings
from workers.vector.engine.scheduler import SearchScheduler
from workers.vector.index.kinds import SearchKind

TOY = replace(
    QUICK, rows=2_000, dim=32, queries=60, efforts=(10, 16, 32, 96), repeats=1,
    separated_rows=1_500, clusters=10, sequences=10, probes=3, load_s=0.2, load_runs=2,
    load_shares=(0.8,), sched_seeds=1, sched_ms=400, kafka_rows=300, kafka_warm_up=20,
    kafka_least=3, kinds=("copies", "log_normal_norms"), random_seeds=(1,), zoo_share=0.05,
    zoo_queries=40, linked_rows=(1_500,), linked_batches=2, updated_rows=3_000,
    ingest_rows=6_000, ingest_step=3_000, ingest_alone_s=0.2,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of faiss's import
def test_benchmark_runs_and_reports_all_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "warm_up", lambda dim: None)
    for module in (results, search, mixed_traffic):
        monkeypatch.setattr(module, "BENCH_DIR", tmp_path)
    parts = [part for part in PARTS if part != "kafka"]
    toy = replace(search.BENCHMARK, quick=TOY)
    toy.main(["--quick", "--json", "--only", *parts])
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "search.json").read_text())
    assert (tmp_path / "search.png").stat().st_size > 10_000
    figures = report["figures"]
    assert set(parts) <= set(figures) and report["load"]["parts"] == parts
    assert set(figures["speed"]["curves"]) == set(report["load"]["indexes"])
    assert figures["clusters"]["trivium"]["recall"] >= 0.99
    assert set(figures["every-kind"]) == {*TOY.kinds, "drawn 1"}
    for kind, result in figures["every-kind"].items():
        assert result["systems"]["trivium"]["recall_at_64"] >= 0.95, kind
    assert figures["warm"]["warm_distances"] > 0
    for name, server in figures["mixed"]["servers"].items():
        unloaded = server["unloaded"]
        completed_searches = unloaded["decode_searches"] + unloaded["prefill_searches"]
        assert completed_searches + unloaded["prefill_misses"] + unloaded["errors"] >= 40, name
        runs = unloaded["runs"]
        assert len(runs) == 2
        assert sum(run["decode_searches"] for run in runs) == unloaded["decode_searches"]


def test_kafka_part_measures_latency_added_by_log(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @contextmanager
    def running_log(_folder: Path) -> Iterator[tuple[LogSettings, int]]:
        yield kafka, os.getpid()

    monkeypatch.setattr(through_the_log, "running_log", running_log)
    monkeypatch.setattr(through_the_log, "BENCH_DIR", tmp_path)
    monkeypatch.setattr(through_the_log, "DEADLINE_MS", 60_000)  # none is to pass
    for name, value in LONG_LEASES.items():
        monkeypatch.setenv(name, value)  # of the worker's process
    with long_leases():
        scene = SearchScene(TOY, ["trivium"], lambda _text: None)
        figures, bars = through_the_log.kafka(scene)
    assert len(bars) == 3 and set(figures["at_rate"]) == {"1", "200"}
    for row in figures["at_rate"].values():
        assert row["added_ms_p50"] is not None
        for way in row["ways"].values():
            assert way["retrievals"] >= 3 and way["errors"] == 0 and way["recall"] == 1


def test_benchmark_omits_missing_peer_with_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(systems, "import_module", missing)
    names, sentences = systems.installed()
    assert names == ["trivium"]
    assert len(sentences) == 4
    assert sentences[0].startswith("hnswlib is left out: No module named 'hnswlib'")


@pytest.mark.parametrize("name", ["hnswlib", "no such system"])
def test_benchmark_omits_peer_that_ends_its_process(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """SVS ends its process on processors that are not Intel's."""
    pytest.importorskip("hnswlib")
    monkeypatch.setattr(systems, "_MODULES", {name: "json"})
    monkeypatch.setattr(systems, "_MAY_END", (name,))
    names, sentences = systems.installed()
    if name == "hnswlib":
        assert (names, sentences) == (["trivium", name], [])
    else:
        assert (names, sentences) == (["trivium"], [f"{name} is left out: KeyError: {name!r}"])


def test_at_recall_interpolates_rates_at_equal_recall() -> None:
    points = [
        OperatingPoint(effort=effort, recall=recall, queries_per_s=rate, queries_per_cpu_s=2 * rate)
        for effort, recall, rate in ((32, 0.9, 4_000.0), (64, 0.99, 1_000.0))
    ]
    assert at_recall(points, 0.9) == pytest.approx(4_000)
    between = at_recall(points, 1 - 0.1**1.5)  # half-way in what is missed
    assert between == pytest.approx(2_000)
    assert at_recall(points, 0.9, of_cpu=True) == pytest.approx(8_000)
    assert at_rate(points, 2_000) == pytest.approx(1 - 0.1**1.5)
    assert at_recall(points, 0.995) is None
    assert at_rate(points, 5_000) is None


USUAL = "as workers run it"


@pytest.mark.parametrize("step", scheduling.STEPS)
def test_simulation_completes_searches_once_and_repeats(step: str) -> None:
    items = scheduling.arrivals(3, 800, step)
    for name, settings in list(scheduling.variants().items())[:6]:
        results = []
        for _ in range(2):
            queues: scheduling.Queues = scheduling.FifoQueues(prefill_first=False)
            if settings is not None:
                queues = SearchScheduler(settings)
            results.append(scheduling.Simulation(queues).run(items))
        first, second = results
        assert first == second, name
        counts = {kind: len(times_ms) for kind, times_ms in first.taken_ms.items()}
        assert counts[SearchKind.DECODE] == sum(item.kind is SearchKind.DECODE for item in items), (
            name
        )
        never = len(items) - sum(counts.values())
        assert 0 <= never <= first.misses[SearchKind.PREFILL], name


def test_measured_scheduler_equals_scheduler_of_workers() -> None:
    """Below capacity it misses less than half of what arrival order or reserved halves miss."""
    step = "surge below capacity"
    variants = scheduling.variants() | {USUAL: RetrievalSettings().scheduler()}
    assert scheduling.BASE in variants.values()
    items = scheduling.arrivals(1, 3_000, step)
    missed = {}
    for name in (scheduling.IN_ORDER, scheduling.HALF, USUAL):
        settings = variants[name]
        queues: scheduling.Queues = scheduling.FifoQueues(prefill_first=False)
        if settings is not None:
            queues = SearchScheduler(replace(settings, ms_per_extend=scheduling.STEP_MS))
        missed[name] = scheduling.Simulation(queues).run(items).missed
    assert missed[USUAL] < missed[scheduling.HALF] / 2
    assert missed[USUAL] < missed[scheduling.IN_ORDER] / 2
