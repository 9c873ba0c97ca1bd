"""The comparison's arithmetic on made-up results, and the whole of it on a tiny case."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from infra.planning.runs import runner
from infra.research.trinity import page, study
from infra.research.trinity.placements import POOL, SHARED
from infra.research.trinity.rag_cluster import TrinityResult
from infra.research.trinity.stage_measurements import StageMeasurement
from infra.research.trinity.study import SweepPoint, break_evens

POINTS = [(1.0, 0.2), (2.0, 0.4), (4.0, 0.8)]


def result(placement: str, ttft_p50: float) -> TrinityResult:
    """One with this time to the first token."""
    return TrinityResult(
        placement=placement, per_s=1.0, llm_workers=2, prefill=1, decode=1, copies=1,
        search_gpus=1, index_gb=1.0, updates_per_s=0.0, requests=1, failed=0, without=0,
        ttft_p50=ttft_p50,
    )  # fmt: skip


def points(*pairs: tuple[float, float, float]) -> list[SweepPoint]:
    """Value, TTFT of the pool, TTFT of the other."""
    return [
        SweepPoint(
            value=value,
            per_s=1.0,
            results={"c": result("c", ours), SHARED.name: result(SHARED.name, rival_ttft)},
            impossible={},
        )
        for value, ours, rival_ttft in pairs
    ]


def by_ttft(*pairs: tuple[float, float, float]) -> study.BreakEven:
    return next(
        break_even for break_even in break_evens(points(*pairs)) if break_even.metric == "TTFT p50"
    )


def test_break_even_lies_where_lead_changes() -> None:
    break_even = by_ttft((0, 90, 100), (10, 100, 100), (20, 100, 90))
    assert break_even.at == pytest.approx(10, abs=0.5)
    assert "(c) is better below 10, a, four share on the other side" in break_even.says
    assert "above" in by_ttft((0, 100, 90), (20, 90, 100)).says


def test_break_even_reports_second_change_of_lead() -> None:
    twice = by_ttft((0, 90, 100), (10, 100, 90), (20, 90, 100))
    assert twice.at == pytest.approx(5, abs=0.5)
    assert twice.says.endswith("until they change places again")


def test_break_even_reports_constant_lead_or_equality() -> None:
    assert by_ttft((0, 90, 100), (1, 100, 100)).says == "(c) is as good or better throughout"
    assert by_ttft((0, 100, 90)).says == "a, four share is as good or better throughout"
    assert by_ttft((0, 100, 100.5)).says == "equal within 1 %"


@pytest.mark.slow
def test_tiny_study_writes_page_with_all_placements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A golden run: what (c) serves, and what it takes, at seed 1."""
    monkeypatch.setattr("infra.bench.results.BENCH_DIR", tmp_path / "bench")
    monkeypatch.setattr(
        study, "variations", lambda *, quick: [("index", "million", (10, 60), study._rows)]
    )
    case = study.base(gpus=6, duration_ms=300.0)
    with runner(1) as pool:
        study_result = study.run_study(pool, case, quick=True)
    measured = [
        StageMeasurement(stage="decode", what="x", unit="tokens/s", points=POINTS, about="here")
    ]
    path = page.write(study_result, measured, tmp_path)
    text = path.read_text()
    for words in ("a, one each", "a, in place", "no answer fits", "Figure 1", "measured: decode"):
        assert words in text
    tree = json.loads((tmp_path / "trinity.json").read_text())
    assert tree["per_s"] == pytest.approx(study_result.per_s)
    assert 30 < study_result.per_s < 60
    pool_run = study_result.sweeps[0].points[0].results[POOL.name]
    assert (pool_run.prefill, pool_run.decode, pool_run.copies) == (3, 2, 1)
    assert pool_run.failed == 0
    report = json.loads((tmp_path / "bench" / "trinity.json").read_text())
    assert report["bars"] == []
    assert report["figures"]["sweeps"][1]["name"] == "index"


def test_study_runs_cases_with_unused_hop_once() -> None:
    case = study.base()
    shared = replace(case, kind=SHARED)
    assert study._without_hop(replace(shared, hop_ms=9.0)) == study._without_hop(shared)
    assert study._without_hop(replace(case, hop_ms=9.0)) != study._without_hop(case)
