"""What the benchmark makes of answers that a killed decode worker interrupted."""

from typing import Any

import pytest

from infra.bench.faults.http_clients import WHOLE, ClientAnswer
from infra.bench.vllm.killed_decode import TIE, bars, figures, first_difference


def seen(request_id: str, *times_s: float, ended: str = WHOLE) -> ClientAnswer:
    return ClientAnswer(
        client="", request_id=request_id, times_s=list(times_s), status=ended, detail="why"
    )


@pytest.mark.parametrize(
    ("left", "right", "place"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None)],
)
def test_answers_differ_from_their_first_other_token_on(
    left: list[int], right: list[int], place: int | None
) -> None:
    assert first_difference(left, right) == place


def test_pauses_are_those_of_interrupted_answers() -> None:
    round_ = [seen("a", 0, 3, 4), seen("b", 0, 9), seen("c", 0, 1, ended="")]
    found = figures(round_, {"a": 7, "c": 5}, [{"gap": TIE / 2}, {"gap": 1.0}, {"gap": None}])
    assert found["interrupted"] == 2
    assert found["gone_on_behind_tokens"] == [5, 7]
    assert (found["pause_s_median"], found["pause_s_max"]) == (2, 3)
    assert found["not_whole"] == ["why"]
    assert found["different_beyond_ties"] == 2


def test_a_round_without_an_interrupted_answer_proves_nothing() -> None:
    row: dict[str, Any] = {"interrupted": 1, "not_whole": [], "different": []}
    assert all(bar.met for bar in bars(row, []))
    others: list[dict[str, Any]] = [
        {"interrupted": 0},
        {"not_whole": ["why"]},
        {"different": [{}]},
    ]
    for worse in others:
        assert not all(bar.met for bar in bars({**row, **worse}, []))
    assert not all(bar.met for bar in bars(row, ["1 without an outcome"]))
