"""Attempts of one request beside each other, without an engine."""

from infra.bench.vllm.batch_effects import compare


def test_compare_reports_first_different_tokens() -> None:
    alone = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    second_run = [[1, 2, 3], [4, 0, 6], [7, 8, 0]]
    assert compare(alone, second_run) == {
        "answers": 3,
        "different": 2,
        "first_difference": [1, 2],
    }
