"""The retrieval benchmark's figures of answers that are kept."""

from typing import Any

from infra.bench.retrieval.cached_answers import EditedPages, TimedAnswer, bars, figures, rows

ROW = {"threshold": 0.8, "guard": True, "false_share": 0.0, "interval": (0.0, 0.001)}


def test_edited_pages_report_stale_answer() -> None:
    scene: Any = None
    shelf = EditedPages(scene)
    before = TimedAnswer(1.0, is_cached=True, cited={"kettle-amber": shelf.pages["amber"].text})
    assert not shelf.is_stale(before)
    shelf.pages["amber"] = EditedPages._page("amber", 7)
    assert shelf.is_stale(before)
    assert not shelf.is_stale(TimedAnswer(1.0, is_cached=True, cited={}))


def test_figures_separate_cached_and_generated_answers() -> None:
    answer_figures = figures(
        [TimedAnswer(2.0, True, {}), TimedAnswer(40.0, False, {}), TimedAnswer(60.0, False, {})]
    )
    assert (answer_figures["kept"], answer_figures["made"]) == (1, 2)
    row = {**answer_figures, "turns": 4, "stale": 1, "pairs": {"rows": [ROW]}}
    assert {bar.name: bar.met for bar in bars(row)} == {
        "stale answers in 4 edits and questions": False, "answers that were kept": True,
        "a kept answer beside one that is made, p50": True,
        "false hits among different questions": True,
    }  # fmt: skip
    assert rows(row)["kept"]["false_hits"] == "0.00% to 0.10%"
