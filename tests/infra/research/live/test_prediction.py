"""What the study of predictions reports of runs; the runs themselves are `trivium evaluate`'s."""

import json
from pathlib import Path

from rich.console import Console

from infra.replay.simulation.speeds import LinearFit, MeasuredSpeeds
from infra.research.live import prediction
from infra.research.live.prediction import PredictionResults, VariantComparison
from schemas.records import Outcome, OutcomeKind
from tests.streams.builders import T0

SPEEDS = MeasuredSpeeds(
    prompt=LinearFit(20.0),
    append=LinearFit(10.0),
    step=LinearFit(5.0),
    transfer=LinearFit(1.0),
    requests_ms=(3.0,),
    hops_ms=(3.0,),
    kv_bytes_per_token=1,
)


def make_outcome(ttft_ms: int, *, kind: OutcomeKind = OutcomeKind.COMPLETED) -> Outcome:
    return Outcome(
        request_id="r",
        session_id="s",
        attempt=1,
        kind=kind,
        written_by="w",
        completion_tokens=11,
        arrived_ms=T0,
        first_token_ms=T0 + ttft_ms,
        ended_ms=T0 + ttft_ms + 100,
    )


def make_results() -> PredictionResults:
    """One way is predicted well, the others badly."""
    ways = [VariantComparison(way.name) for way in (prediction.RECORDED, *prediction.PREDICTED)]
    for number, way in enumerate(ways):
        way.live = [make_outcome(100) for _ in range(20)]
        way.predicted = [make_outcome(110 if number == 1 else 200) for _ in range(20)]
    repeat = VariantComparison("again", ways[0].live, ways[0].live)
    load = prediction.load_of(10.0, 2.0, 7)
    return PredictionResults(load, 1, [SPEEDS], ways, repeat)


def test_bars_accept_errors_within_limits() -> None:
    bars = prediction.bars(make_results())
    assert len(bars) == 4 * len(prediction.PREDICTED)
    good, bad = bars[:4], bars[4:8]
    assert [bar.met for bar in good] == [True] * 4
    assert good[0].name == f"{prediction.PREDICTED[0].name}: ttft p50"
    assert [round(bar.value or 0) for bar in good] == [10, 10, 5, 5]
    assert [bar.met for bar in bad] == [False] * 4
    assert [bar.target for bar in bad] == ["within 15%", "within 25%"] * 2


def test_report_contains_figures_and_errors(tmp_path: Path) -> None:
    report = json.loads(prediction.write(make_results(), tmp_path).read_text())
    ways = report["figures"]["ways"]
    first = ways[prediction.PREDICTED[0].name]
    assert first["live"]["answers"] == 20
    assert round(first["errors"]["ttft_ms"]["p90"], 3) == 0.1
    assert ways["again"]["errors"]["e2e_ms"]["p99"] == 0.0
    assert report["figures"]["speeds"][0]["prompt_ms"] == 20.0
    console = Console(record=True, width=200)
    console.print(prediction.table(make_results()))
    assert "100 (+10%)" in console.export_text()


def test_load_arrives_at_requested_rate() -> None:
    load = prediction.load_of(30.0, 2.0, 1)
    assert load.conversations == 60
    assert 20.0 < load.begins_s()[-1] < 45.0
