"""What the benchmark makes of answers that a killed decode worker interrupted."""

from typing import Any

import pytest

from infra.bench.faults.http_clients import WHOLE, ClientAnswer
from infra.bench.vllm.killed_decode import TIE, bars, figures, first_difference


def client_answer(request_id: str, *times_s: float, status: str = WHOLE) -> ClientAnswer:
    return ClientAnswer(
        client="", request_id=request_id, times_s=list(times_s), status=status, detail="why"
    )


@pytest.mark.parametrize(
    ("left_tokens", "right_tokens", "place"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None)],
)
def test_first_difference_finds_first_unequal_token(
    left_tokens: list[int], right_tokens: list[int], place: int | None
) -> None:
    assert first_difference(left_tokens, right_tokens) == place


def test_figures_measure_pauses_of_interrupted_answers() -> None:
    round_ = [
        client_answer("a", 0, 3, 4),
        client_answer("b", 0, 9),
        client_answer("c", 0, 1, status=""),
    ]
    result = figures(round_, {"a": 7, "c": 5}, [{"gap": TIE / 2}, {"gap": 1.0}, {"gap": None}])
    assert result["interrupted"] == 2
    assert result["gone_on_behind_tokens"] == [5, 7]
    assert (result["pause_s_median"], result["pause_s_max"]) == (2, 3)
    assert result["not_whole"] == ["why"]
    assert result["different_beyond_ties"] == 2


def test_bars_fail_without_interrupted_answer() -> None:
    row: dict[str, Any] = {"interrupted": 1, "not_whole": [], "different": []}
    assert all(bar.met for bar in bars(row, []))
    deviations: list[dict[str, Any]] = [
        {"interrupted": 0},
        {"not_whole": ["why"]},
        {"different": [{}]},
    ]
    for worse in deviations:
        assert not all(bar.met for bar in bars({**row, **worse}, []))
    assert not all(bar.met for bar in bars(row, ["1 without an outcome"]))
